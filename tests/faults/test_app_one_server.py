"""One server a data directory: the lock says who serves, whatever files and process ids say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tidegate.app.layout import DataDirectory, ServerAddress
from tidegate.core.errors import ConflictError

URL = "http://127.0.0.1:8080"
ADDRESS = ServerAddress(url=URL, admin_url="http://127.0.0.1:8081", pid=os.getpid())
HOLDER = """
import sys, time
from pathlib import Path
from tidegate.app.layout import DataDirectory, ServerAddress
data = DataDirectory(root=Path(sys.argv[1]))
with data.served_alone():
    data.announce_server(ServerAddress(url="http://127.0.0.1:9", admin_url="http://127.0.0.1:10", pid=1))
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def data(tmp_path: Path) -> DataDirectory:
    return DataDirectory(root=tmp_path / "data").create()


def test_nothing_is_served_where_nothing_is(tmp_path: Path) -> None:
    assert DataDirectory(root=tmp_path / "absent").server() is None
    (tmp_path / "file").write_text("")
    assert DataDirectory(root=tmp_path / "file").server() is None
    assert not (tmp_path / "absent").exists()


def test_an_announcement_counts_only_while_the_lock_is_held(data: DataDirectory) -> None:
    with data.served_alone():
        data.announce_server(ADDRESS)
        assert data.server() == ADDRESS
    assert (data.root / "server.json").exists()
    assert data.server() is None  # though the process of this number lives


@pytest.mark.parametrize("body", [None, "", "{}", '{"url": 1, "admin_url": "x", "pid": "p"}'])
def test_a_server_that_is_starting_is_told_apart_from_none(data: DataDirectory, body: str | None) -> None:
    with data.served_alone():
        if body is not None:
            (data.root / "server.json").write_text(body)
        with pytest.raises(ConflictError, match=r"a server is starting on .*try again"):
            data.server()
        with pytest.raises(ConflictError, match="a server that is starting"), data.served_alone():
            pytest.fail("two servers")


def test_a_second_server_is_refused_with_the_address_of_the_first(data: DataDirectory) -> None:
    with data.served_alone():
        data.announce_server(ADDRESS)
        with pytest.raises(ConflictError, match=URL), data.served_alone():
            pytest.fail("two servers")
        assert data.server() == ADDRESS  # the refused one took nothing down
    with data.served_alone():
        pass


def test_a_killed_server_leaves_neither_lock_nor_address(data: DataDirectory) -> None:
    arguments = [sys.executable, "-c", HOLDER, str(data.root)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        found = data.server()
        assert found is not None
        assert found.pid == 1
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    assert data.server() is None
    with data.served_alone(), pytest.raises(ConflictError, match="starting"):
        data.server()  # and not the address that the killed one left


def test_who_asks_for_the_server_never_keeps_one_from_starting(data: DataDirectory) -> None:
    stop = threading.Event()
    with data.served_alone():
        pass

    def ask() -> None:
        while not stop.is_set():
            try:
                data.server()
            except ConflictError:
                continue

    asker = threading.Thread(target=ask)
    asker.start()
    try:
        for _ in range(300):
            with data.served_alone():
                pass
    finally:
        stop.set()
        asker.join()

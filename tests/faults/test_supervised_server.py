"""A server process of ours: it starts, ends, dies and comes back, and nothing of it is ever left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from engine_fixtures import answer, call
from gateway_world import until
from supervised_world import MODEL, QUICK, StandIn, client, kill
from tidegate.core.errors import EngineError, EngineTimeoutError, EngineUnavailableError
from tidegate.engines.remote import VllmEngine
from tidegate.engines.remote.models import listed_models
from tidegate.engines.supervised import ServerState


@pytest.fixture
def stand_in(tmp_path: Path) -> StandIn:
    return StandIn(tmp_path / "stand-in")


async def test_it_serves_for_the_length_of_the_block_where_nobody_else_can_enter(stand_in: StandIn) -> None:
    async with stand_in.running() as server:
        assert (server.state, server.why_down()) == (ServerState.SERVING, None)
        async with client(server) as upstream:
            assert MODEL in await listed_models(upstream)
        assert len(stand_in.alive()) == 1
        assert mode_of(server.socket.parent) == 0o700
    assert stand_in.alive() == []
    assert not server.socket.parent.exists()
    assert server.why_down() == "one: it was stopped"
    assert len(stand_in.pids()) == 1


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


async def test_a_slow_start_is_waited_for(stand_in: StandIn) -> None:
    stand_in.switch("hold", on=True)
    started: list[str] = []

    async def use() -> None:
        async with stand_in.running() as server:
            started.append(server.name)

    using = asyncio.create_task(use())
    await until(stand_in.pids)
    assert not started
    stand_in.switch("hold", on=False)
    async with asyncio.timeout(60):
        await using
    assert started


async def test_a_start_that_takes_too_long_is_ended_and_named(stand_in: StandIn) -> None:
    stand_in.switch("hold", on=True)
    with pytest.raises(EngineTimeoutError, match=r"did not serve within 1 s.*engine\.start_timeout_s") as caught:
        async with stand_in.running(patience=replace(QUICK, start_timeout_s=1.0)):
            pass
    assert "one.log" in str(caught.value)
    assert stand_in.alive() == []


async def test_the_last_words_of_one_that_dies_at_start_are_told(stand_in: StandIn) -> None:
    stand_in.switch("die", on=True, text="Traceback:\n  out of memory")
    with pytest.raises(EngineError) as caught:
        async with stand_in.running():
            pass
    told = str(caught.value)
    assert "ended with exit code 3 before it served" in told
    assert told.endswith("out of memory")
    log = stand_in.folder / "engines" / "one.log"
    assert repr(str(log)) in told
    assert mode_of(log) == 0o600


async def test_only_the_last_starts_words_are_told(stand_in: StandIn) -> None:
    for words in ("first", "second"):
        stand_in.switch("die", on=True, text=words)
        with pytest.raises(EngineError) as caught:
            async with stand_in.running():
                pass
        assert words in str(caught.value)
    assert "first" not in str(caught.value)


async def test_a_command_that_does_not_exist_is_named(stand_in: StandIn) -> None:
    plan = replace(stand_in.plan(), command=lambda path: ["/no/such/python"])
    stand_in.plan = lambda name="one": plan  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="'/no/such/python' cannot be started: No such file"):
        async with stand_in.running():
            pass


async def test_one_that_is_killed_comes_back_at_the_same_place(stand_in: StandIn) -> None:
    async with stand_in.running() as server:
        socket, (first,) = server.socket, stand_in.alive()
        kill(first)
        await until(lambda: server.restarts == 1)
        assert (server.socket, server.state, server.why_down()) == (socket, ServerState.SERVING, None)
        assert first not in stand_in.alive()
        async with client(server) as upstream:
            assert MODEL in await listed_models(upstream)
        assert any("ended by signal 9 and is started again" in line for line in stand_in.said)
    assert stand_in.alive() == []


async def test_while_it_is_away_the_engine_says_why(stand_in: StandIn) -> None:
    async with stand_in.running() as server, client(server) as upstream:
        engine = VllmEngine(upstream, model=MODEL, base_sha256="b" * 64, replica=server.name, why_down=server.why_down)
        assert (await engine.health()).ready
        stand_in.switch("hold", on=True)
        kill(stand_in.alive()[0])
        await until(lambda: server.state is ServerState.RESTARTING)
        health = await engine.health()
        assert (health.ready, health.detail) == (False, "one: it ended by signal 9")
        with pytest.raises(EngineUnavailableError, match="one: it ended by signal 9"):
            await answer(engine, call())
        stand_in.switch("hold", on=False)
        await until(lambda: server.state is ServerState.SERVING)
        assert (await engine.health()).ready


async def test_what_a_killed_server_left_is_gone_before_it_comes_back(stand_in: StandIn) -> None:
    stand_in.switch("child", on=True)
    async with stand_in.running(patience=replace(QUICK, grace_s=0.2)) as server:
        first, orphan = stand_in.alive()
        kill(first)
        await until(lambda: server.restarts == 1)
        assert orphan not in stand_in.alive()
        assert len(stand_in.alive()) == 2
    assert stand_in.alive() == []


async def test_one_that_keeps_dying_is_given_up_with_the_reason(stand_in: StandIn) -> None:
    async with stand_in.running() as server:
        stand_in.switch("die", on=True, text="no device")
        kill(stand_in.alive()[0])
        await until(lambda: server.state is ServerState.FAILED)
        reason = server.why_down()
        assert reason is not None
        assert "ended 4 times in a row and is not started again" in reason
        assert "no device" in reason
        assert len(stand_in.pids()) == 1 + QUICK.max_restarts
    assert stand_in.alive() == []


async def test_an_attempt_that_takes_too_long_makes_room_for_the_next(stand_in: StandIn) -> None:
    async with stand_in.running() as server:
        stand_in.switch("hold", on=True)
        kill(stand_in.alive()[0])
        await until(lambda: len(stand_in.pids()) == 2)
        stand_in.ahead_s += QUICK.start_timeout_s
        await until(lambda: len(stand_in.pids()) == 3)
        assert len(stand_in.alive()) <= 1
        stand_in.switch("hold", on=False)
        await until(lambda: server.restarts == 1)
    assert stand_in.alive() == []


async def test_one_that_served_long_enough_has_all_its_attempts_again(stand_in: StandIn) -> None:
    patience = replace(QUICK, max_restarts=1, settled_s=0.0)
    async with stand_in.running(patience=patience) as server:
        for times in (1, 2, 3):
            kill(stand_in.alive()[0])
            await until(lambda times=times: server.restarts == times)
    unsettled = replace(patience, settled_s=3600.0)
    async with stand_in.running(patience=unsettled) as server:
        kill(stand_in.alive()[0])
        await until(lambda: server.restarts == 1)
        kill(stand_in.alive()[0])
        await until(lambda: server.state is ServerState.FAILED)


async def test_a_server_and_a_child_that_ignore_sigterm_are_killed(stand_in: StandIn) -> None:
    stand_in.switch("stubborn", on=True)
    stand_in.switch("child", on=True)
    async with stand_in.running(patience=replace(QUICK, grace_s=0.2)):
        assert len(stand_in.alive()) == 2
    assert stand_in.alive() == []


async def test_a_keeper_that_is_killed_takes_its_server_along_and_both_come_back(stand_in: StandIn) -> None:
    async with stand_in.running() as server:
        (first,) = stand_in.alive()
        assert server._process is not None
        kill(server._process.pid)
        await until(lambda: server.restarts == 1)
        assert len(stand_in.alive()) == 1
        assert first not in stand_in.alive()
    assert stand_in.alive() == []


async def test_cancelling_a_start_leaves_nothing(stand_in: StandIn) -> None:
    stand_in.switch("hold", on=True)

    async def use() -> None:
        async with stand_in.running():
            raise AssertionError("it cannot serve")

    using = asyncio.create_task(use())
    await until(stand_in.pids)
    using.cancel()
    await asyncio.wait({using})
    assert using.cancelled()
    assert stand_in.alive() == []


async def test_a_second_server_of_the_same_name_waits_for_the_first_to_end(stand_in: StandIn) -> None:
    second = StandIn(stand_in.folder.parent / "second")
    engines = stand_in.folder / "engines"
    async with stand_in.running():
        with pytest.raises(EngineTimeoutError, match="waiting: another server of this data directory still runs"):
            async with stand_in.running(patience=replace(QUICK, start_timeout_s=1.0)):
                pass
        assert len(stand_in.pids()) == 1
    async with stand_in.running():
        assert len(stand_in.alive()) == 1
    assert second.pids() == []
    assert (engines / "one.lock").exists()


def test_when_we_are_killed_nothing_is_left(stand_in: StandIn) -> None:
    stand_in.switch("child", on=True)
    script = textwrap.dedent(
        f"""
        import asyncio
        from dataclasses import replace
        from pathlib import Path
        from supervised_world import QUICK, StandIn

        async def main():
            async with StandIn(Path({str(stand_in.folder)!r})).running(patience=replace(QUICK, grace_s=0.2)):
                print("up", flush=True)
                await asyncio.Event().wait()

        asyncio.run(main())
        """
    )
    paths = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}
    )
    assert process.stdout is not None
    with process, process.stdout as output:
        assert output.readline() == b"up\n"
        assert len(stand_in.alive()) == 2
        process.send_signal(signal.SIGKILL)
    asyncio.run(until(lambda: not stand_in.alive()))

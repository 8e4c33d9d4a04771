"""A replica set over scripted members: what one that fails costs the others, and how it comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace

import pytest

from fake_engine import FakeEngine
from gateway_world import until
from replica_world import PROMPTS, SOON, Replica, asked, ref, scripted
from tidegate.core.errors import (
    AdapterError,
    ConfigError,
    EngineBusyError,
    EngineError,
    EngineTimeoutError,
    EngineUnavailableError,
    RequestError,
    TidegateError,
)
from tidegate.core.generation import collect
from tidegate.engines.replicas import Breaker, ReplicaSet

GONE = EngineUnavailableError("nobody listens")
NEVER = replace(SOON, check_interval_s=600.0, retry_s=600.0, longest_retry_s=600.0)
"""Nobody is looked at a second time unless something happens."""


def in_service(engine: ReplicaSet) -> set[str]:
    return {replica for replica, state in engine.breakers().items() if state is Breaker.CLOSED}


async def all_in_service(engine: ReplicaSet, count: int) -> None:
    await until(lambda: len(in_service(engine)) == count)


async def answered_by(engine: ReplicaSet, adapter: str | None = None) -> str | None:
    return (await collect(engine.generate(asked(adapter)))).replica


# -- the set of adapters ----------------------------------------------------------------------------------------------


async def test_a_load_is_over_when_every_member_has_acknowledged() -> None:
    async with scripted(3) as (engine, replicas):
        replicas[1].hangs.add("load")
        loading = asyncio.create_task(engine.load(ref("x")))
        await until(lambda: all("load x" in one.asked for one in replicas))
        assert not loading.done()
        replicas[1].released.set()
        await loading
        assert [list(one.adapters) for one in replicas] == [["x"]] * 3
        assert await engine.list_adapters() == (ref("x"),)


async def test_files_that_one_member_finds_fault_with_stay_on_none() -> None:
    async with scripted(3) as (engine, replicas):
        await engine.load(ref("x"))
        replicas[2].fails["load"] = AdapterError("hashes to something else")
        with pytest.raises(AdapterError, match="hashes to something else"):
            await engine.load(ref("y"))
        assert [list(one.adapters) for one in replicas] == [["x"]] * 3
        assert await engine.list_adapters() == (ref("x"),)
        assert len(in_service(engine)) == 3


async def test_a_member_that_cannot_load_stands_back_until_it_can() -> None:
    async with scripted(3) as (engine, replicas):
        replicas[0].fails["load"] = EngineError("out of memory")
        await engine.load(ref("x"))
        assert in_service(engine) == {"r1", "r2"}
        assert "r0: it did not load 'x': out of memory" in (await engine.health()).detail
        assert {await answered_by(engine, adapter="x") for _ in range(4)} == {"r1", "r2"}
        del replicas[0].fails["load"]
        await all_in_service(engine, 3)
        assert replicas[0].asked[-3:].count("probe x") <= 1
        assert "probe x" in replicas[0].asked
        assert {await answered_by(engine, adapter="x") for _ in range(4)} == {"r0", "r1", "r2"}


async def test_what_nobody_can_load_costs_nobody_its_service() -> None:
    async with scripted(2) as (engine, replicas):
        for one in replicas:
            one.fails["load"] = EngineTimeoutError("the disk is slow")
        with pytest.raises(EngineUnavailableError, match=r"no replica loaded 'x': r0: the disk is slow; r1: the disk"):
            await engine.load(ref("x"))
        assert len(in_service(engine)) == 2
        assert await engine.list_adapters() == ()


async def test_a_wedged_member_does_not_hold_up_a_swap() -> None:
    limits = replace(NEVER, swap_timeout_s=0.05)
    async with scripted(2, limits) as (engine, replicas):
        replicas[0].hangs.add("load")
        await engine.load(ref("x"))
        assert in_service(engine) == {"r1"}
        assert "did not load 'x' within 0.05 s" in (await engine.health()).detail


async def test_a_wedged_member_is_found_out_while_the_others_load() -> None:
    limits = replace(NEVER, check_timeout_s=0.05)
    async with scripted(2, limits) as (engine, replicas):
        replicas[0].hangs |= {"load", "list_adapters", "health"}
        await engine.load(ref("x"))  # the limit of a load is a minute
        assert in_service(engine) == {"r1"}
        assert "did not answer a check within 0.05 s" in (await engine.health()).detail


async def test_a_name_is_taken_for_the_whole_set() -> None:
    async with scripted(2) as (engine, replicas):
        await engine.load(ref("x"))
        with pytest.raises(AdapterError, match="'x' is taken"):
            await engine.load(ref("x", "c" * 64))
        assert [one.adapters["x"] for one in replicas] == [ref("x")] * 2


async def test_an_adapter_that_was_unloaded_while_a_member_was_away_is_forgotten_there() -> None:
    async with scripted(2) as (engine, replicas):
        await engine.load(ref("x"))
        replicas[0].fails["list_adapters"] = GONE
        await until(lambda: in_service(engine) == {"r1"})
        await engine.unload("x")
        assert (list(replicas[0].adapters), list(replicas[1].adapters)) == (["x"], [])
        del replicas[0].fails["list_adapters"]
        await all_in_service(engine, 2)
        assert list(replicas[0].adapters) == []


async def test_two_swaps_while_a_member_is_away_reach_it_in_one() -> None:
    async with scripted(2) as (engine, replicas):
        await engine.load(ref("x"))
        replicas[0].fails["list_adapters"] = GONE
        await until(lambda: in_service(engine) == {"r1"})
        replicas[0].restart()
        await engine.load(ref("y"))
        await engine.unload("x")
        await engine.load(ref("z"))
        await engine.unload("y")
        del replicas[0].fails["list_adapters"]
        await all_in_service(engine, 2)
        assert list(replicas[0].adapters) == ["z"]
        assert "load y" not in replicas[0].done
        assert {await answered_by(engine, adapter="z") for _ in range(2)} == {"r0", "r1"}


async def test_an_unload_that_fails_is_tried_again() -> None:
    async with scripted(2) as (engine, replicas):
        await engine.load(ref("x"))
        replicas[0].fails["unload"] = EngineError("not now")
        await engine.unload("x")
        assert await engine.list_adapters() == ()
        assert list(replicas[0].adapters) == ["x"]
        del replicas[0].fails["unload"]
        await until(lambda: not replicas[0].adapters)


async def test_an_adapter_that_is_loaded_while_a_member_comes_back_is_not_missed() -> None:
    async with scripted(2) as (engine, replicas):
        await engine.load(ref("x"))
        replicas[0].hangs.add("probe")
        replicas[0].restart()
        await until(lambda: "probe x" in replicas[0].asked)
        await engine.load(ref("y"))
        assert in_service(engine) == {"r1"}
        replicas[0].hangs.clear()
        replicas[0].released.set()
        await all_in_service(engine, 2)
        assert set(replicas[0].adapters) == {"x", "y"}
        assert "probe y" in replicas[0].asked


async def test_nothing_is_loaded_where_nobody_serves() -> None:
    async with scripted(2, NEVER, ready=False) as (engine, _):
        with pytest.raises(EngineUnavailableError, match=r"'x' is loaded nowhere: .*r0: still loading; r1: still"):
            await engine.load(ref("x"))
        assert await engine.list_adapters() == ()


async def test_what_was_loaded_before_is_loaded_while_nobody_serves() -> None:
    """A rollback must not wait for servers that are being started again."""
    async with scripted(2) as (engine, replicas):
        await engine.load(ref("x"))
        for one in replicas:
            one.ready = False
        await until(lambda: not in_service(engine))
        await engine.load(ref("x"))
        with pytest.raises(EngineUnavailableError):
            await engine.load(ref("y"))
        assert await engine.list_adapters() == (ref("x"),)
        for one in replicas:
            one.restart()
            one.ready = True
        await all_in_service(engine, 2)
        assert [list(one.adapters) for one in replicas] == [["x"]] * 2


# -- proofs -----------------------------------------------------------------------------------------------------------


async def test_a_probe_gives_the_smallest_difference() -> None:
    async with scripted(3) as (engine, replicas):
        await engine.load(ref("x"))
        for one, difference in zip(replicas, (3.0, 0.5, 2.0), strict=True):
            one.difference = difference
        assert (await engine.probe("x", against=None, prompts=PROMPTS)).max_logit_difference == 0.5


async def test_one_member_that_answers_with_base_weights_leaves_and_the_others_decide() -> None:
    async with scripted(3, NEVER) as (engine, replicas):
        await engine.load(ref("x"))
        replicas[1].difference = 0.0
        assert (await engine.probe("x", against=None, prompts=PROMPTS)).max_logit_difference == 1.0
        assert in_service(engine) == {"r0", "r2"}
        assert "r1: it lists 'x' and answers as if it were not loaded" in (await engine.health()).detail


async def test_an_adapter_that_changes_nothing_anywhere_is_not_proven_and_nobody_leaves() -> None:
    async with scripted(2, difference=0.0) as (engine, _):
        await engine.load(ref("x"))
        assert (await engine.probe("x", against=None, prompts=PROMPTS)).max_logit_difference == 0.0
        assert len(in_service(engine)) == 2


async def test_bytes_that_differ_from_those_of_the_release_are_reported_or_leave() -> None:
    async with scripted(2, NEVER) as (engine, replicas):
        await engine.load(ref("x"))
        replicas[0].sha256 = "f" * 64
        assert (await engine.probe("x", against=None, prompts=PROMPTS)).sha256 == ref("x").sha256
        assert in_service(engine) == {"r1"}
        replicas[1].sha256 = "f" * 64
        assert (await engine.probe("x", against=None, prompts=PROMPTS)).sha256 == "f" * 64


async def test_a_member_that_was_restarted_between_load_and_probe_is_left_out_and_brought_back() -> None:
    async with scripted(2, replace(SOON, check_interval_s=600.0)) as (engine, replicas):
        await engine.load(ref("x"))
        await until(lambda: all(one.asked.count("health") >= 2 for one in replicas))  # the looks that a load asks for
        replicas[0].restart()
        replicas[0].hangs.add("load")
        assert (await engine.probe("x", against=None, prompts=PROMPTS)).max_logit_difference == 1.0
        assert in_service(engine) == {"r1"}
        replicas[0].released.set()
        await all_in_service(engine, 2)
        assert list(replicas[0].adapters) == ["x"]


async def test_a_member_that_comes_back_with_base_weights_under_the_name_gets_no_traffic() -> None:
    async with scripted(2) as (engine, replicas):
        await engine.load(ref("x"))
        replicas[0].difference = 0.0
        replicas[0].restart()
        await until(lambda: replicas[0].asked.count("probe x") >= 3)
        assert list(replicas[0].adapters) == ["x"]
        assert {await answered_by(engine, adapter="x") for _ in range(4)} == {"r1"}
        assert {await answered_by(engine) for _ in range(4)} == {"r1"}
        replicas[0].difference, replicas[0].sha256 = 1.0, "f" * 64
        probes = replicas[0].asked.count("probe x")
        await until(lambda: replicas[0].asked.count("probe x") >= probes + 3)
        assert in_service(engine) == {"r1"}
        replicas[0].sha256 = None
        await all_in_service(engine, 2)


# -- calls ------------------------------------------------------------------------------------------------------------


async def test_the_member_with_the_fewest_running_calls_answers() -> None:
    async with scripted(3) as (engine, replicas):
        for one in replicas:
            one.hold_at = 1
        running = [asyncio.create_task(answered_by(engine)) for _ in range(6)]
        await until(lambda: [one.holding for one in replicas] == [2, 2, 2])
        assert (await engine.health()).running == 6
        for one in replicas:
            one.go.set()
        assert sorted(map(str, await asyncio.gather(*running))) == ["r0", "r0", "r1", "r1", "r2", "r2"]
        assert (await engine.health()).running == 0


@pytest.mark.parametrize(
    ("failure", "why"),
    [(GONE, "unavailable"), (EngineBusyError("full"), "busy"), (AdapterError("no such model"), "lost_adapter")],
)
async def test_a_call_that_nothing_was_sampled_for_moves_on(failure: TidegateError, why: str) -> None:
    async with scripted(2, NEVER) as (engine, replicas):
        await engine.load(ref("x"))
        replicas[0].fails = {"generate": failure, "sequence_logprobs": failure}
        assert await answered_by(engine, adapter="x") == "r1"
        assert engine.failovers() == {**dict.fromkeys(("busy", "unavailable", "lost_adapter", "silent"), 0), why: 1}
        await until(lambda: "r0" in in_service(engine))  # one that has lost an adapter loads it again, once at once
        assert len(await engine.sequence_logprobs("x", [1, 2, 3])) == 2
        assert engine.failovers()[why] == 2
        assert ("r0" in in_service(engine)) is (why != "lost_adapter")


@pytest.mark.parametrize(
    "failure", [EngineError("status 500"), EngineTimeoutError("silent"), RequestError("temperature is a number")]
)
async def test_a_failure_that_the_call_may_have_caused_is_told_at_once(failure: TidegateError) -> None:
    async with scripted(2) as (engine, replicas):
        for one in replicas:
            one.fails["generate"] = failure
        with pytest.raises(type(failure), match=str(failure)):
            await answered_by(engine)
        assert sum("generate None" in one.asked[-2:] for one in replicas) <= 2
        assert sum(engine.failovers().values()) == 0


async def test_after_its_first_event_a_call_never_moves() -> None:
    async with scripted(2, fail_at=2, failure=GONE) as (engine, replicas):
        with pytest.raises(EngineUnavailableError):
            await answered_by(engine)
        assert [len(one.requests) for one in replicas] == [2, 1]  # each was asked for one token when it came


async def test_all_busy_members_tell_the_shortest_time_to_wait() -> None:
    async with scripted(3) as (engine, replicas):
        for one, wait_s in zip(replicas, (9, 4, None), strict=True):
            one.fails["generate"] = EngineBusyError("full", retry_after_s=wait_s)
        with pytest.raises(EngineBusyError, match=r"every replica that could answer is busy: r.: full") as caught:
            await answered_by(engine)
        assert caught.value.retry_after_s == 4


async def test_no_member_in_service_says_which_and_why() -> None:
    async with scripted(2, NEVER) as (engine, replicas):
        replicas[0].fails["generate"] = replicas[0].fails["list_adapters"] = GONE
        replicas[1].fails["generate"] = replicas[1].fails["list_adapters"] = EngineUnavailableError("starts")
        for _ in range(2):
            with pytest.raises(EngineUnavailableError, match="no replica in service can answer: ") as caught:
                await answered_by(engine)
            assert "r0: nobody listens" in str(caught.value)
            assert "r1: starts" in str(caught.value)
            await until(lambda: not in_service(engine))
        health = await engine.health()
        assert not health.ready
        assert health.detail.startswith("0 of 2 replicas in service; not: r0: nobody listens")


async def test_an_adapter_that_nobody_wants_is_no_members_fault() -> None:
    async with scripted(2) as (engine, _):
        for one in (answered_by(engine, adapter="x"), engine.sequence_logprobs("x", [1, 2])):
            with pytest.raises(AdapterError, match="'x' is not loaded"):
                await one
        assert len(in_service(engine)) == 2


async def test_a_call_that_is_closed_is_closed_where_it_runs() -> None:
    async with scripted(2, hold_at=2) as (engine, replicas):
        before = sum(one.closed_early for one in replicas)
        async with aclosing(engine.generate(asked())) as events:
            await anext(events)
        assert sum(one.closed_early for one in replicas) == before + 1
        waiting = asyncio.create_task(answered_by(engine))
        await until(lambda: any(one.holding for one in replicas))
        waiting.cancel()
        await until(lambda: not any(one.holding for one in replicas))
        assert (await engine.health()).running == 0


# -- breakers ---------------------------------------------------------------------------------------------------------


async def fail(engine: ReplicaSet, times: int) -> None:
    for _ in range(times):
        with pytest.raises(EngineError):
            await answered_by(engine)


async def test_failed_calls_in_a_row_open_the_breaker_until_one_is_answered() -> None:
    async with scripted(2, replace(SOON, check_interval_s=600.0)) as (engine, replicas):
        bad, good = replicas
        good.fails["generate"] = EngineBusyError("full")  # so that every call meets the bad one
        bad.fails["generate"] = EngineError("status 500")
        await fail(engine, 2)
        del bad.fails["generate"]
        await answered_by(engine)  # not in a row
        bad.fails["generate"] = EngineError("status 500")
        await fail(engine, 2)
        assert in_service(engine) == {"r0", "r1"}
        await fail(engine, 1)
        assert in_service(engine) == {"r1"}
        assert "3 calls in a row failed, the last one because status 500" in (await engine.health()).detail
        tried = bad.asked.count("generate None")
        await until(lambda: bad.asked.count("generate None") >= tried + 3)  # its health is good, its answers are not
        assert in_service(engine) == {"r1"}
        del bad.fails["generate"]
        await all_in_service(engine, 2)


async def test_a_clients_mistakes_open_no_breaker() -> None:
    async with scripted(2) as (engine, replicas):
        for one in replicas:
            one.fails["generate"] = RequestError("too long")
        for _ in range(20):
            with pytest.raises(RequestError):
                await answered_by(engine)
        assert len(in_service(engine)) == 2


async def test_a_member_that_accepts_and_never_answers_gets_no_more_requests() -> None:
    limits = replace(SOON, first_event_timeout_s=0.05)
    async with scripted(2, limits) as (engine, replicas):
        replicas[0].hangs.add("generate")  # its health is good
        calls = [asyncio.create_task(answered_by(engine)) for _ in range(6)]
        assert {await one for one in calls} == {"r1"}  # the three that waited moved on
        assert engine.failovers()["silent"] == 3
        assert "nothing was heard for 0.05 s" in (await engine.health()).detail
        assert {await answered_by(engine) for _ in range(4)} == {"r1"}
        replicas[0].hangs.clear()
        replicas[0].released.set()
        await all_in_service(engine, 2)


async def test_a_call_that_stands_in_a_queue_is_not_held_against_a_member_that_answers_others() -> None:
    limits = replace(NEVER, first_event_timeout_s=0.05, failures=1)
    async with scripted(2, limits) as (engine, (one, other)), scripted(2, limits) as (silent, (wedged, _)):
        other.fails["generate"] = EngineBusyError("full")
        one.hold_at = 0
        waiting = asyncio.create_task(answered_by(engine))
        await until(lambda: one.holding == 1)
        one.hold_at = None
        wedged.hangs.add("generate")
        moved = asyncio.create_task(answered_by(silent))
        while "r0" in in_service(silent):  # it began later, and hears nothing
            assert await answered_by(engine) == "r0"
        assert await moved == "r1"
        assert "r0" in in_service(engine)
        one.go.set()
        assert await waiting == "r0"


async def test_a_call_leaves_a_silent_member_once_only() -> None:
    limits = replace(NEVER, first_event_timeout_s=0.05, failures=1)
    async with scripted(3, limits) as (engine, replicas):
        for one in replicas:
            one.hangs.add("generate")
        waiting = asyncio.create_task(answered_by(engine))
        await until(lambda: len(in_service(engine)) == 1)
        assert sum(one.asked.count("generate None") == 2 for one in replicas) == 2
        for one in replicas:
            one.released.set()
        await waiting


async def test_a_member_that_is_silent_to_a_check_but_answers_calls_is_busy() -> None:
    limits = replace(SOON, check_timeout_s=0.05)
    async with scripted(2, limits) as (engine, replicas):
        replicas[0].hangs.add("health")
        for _ in range(20):
            looks = replicas[0].asked.count("health")
            while replicas[0].asked.count("health") == looks:
                await answered_by(engine)
        assert in_service(engine) == {"r0", "r1"}


# -- one member -------------------------------------------------------------------------------------------------------


async def test_a_single_member_stays_for_slowness_and_failed_calls() -> None:
    limits = replace(SOON, check_timeout_s=0.01, first_event_timeout_s=0.01)
    async with scripted(1, limits) as (engine, (one,)):
        await engine.load(ref("x"))
        one.hangs |= {"health", "list_adapters"}
        one.fails["generate"] = EngineError("status 500")
        for _ in range(10):
            with pytest.raises(EngineError, match="status 500"):
                await answered_by(engine, adapter="x")
        looks = one.asked.count("list_adapters")
        await until(lambda: one.asked.count("list_adapters") > looks + 1)
        del one.fails["generate"]
        assert await answered_by(engine, adapter="x") == "r0"


async def test_a_single_member_that_was_restarted_is_healed() -> None:
    async with scripted(1, replace(SOON, check_interval_s=600.0)) as (engine, (one,)):
        await engine.load(ref("x"))
        await until(lambda: one.asked.count("health") >= 2)
        one.restart()
        one.hangs.add("load")
        with pytest.raises(EngineUnavailableError, match="loaded again, repeat the request in a moment"):
            await answered_by(engine, adapter="x")
        assert in_service(engine) == set()
        assert await answered_by(engine) == "r0"  # its base is as good as ever
        one.released.set()
        await all_in_service(engine, 1)
        assert await answered_by(engine, adapter="x") == "r0"
        assert one.asked.count("probe x") == 1


async def test_a_single_member_speaks_for_itself() -> None:
    async with scripted(1) as (engine, (one,)):
        one.fails["generate"] = EngineBusyError("full", retry_after_s=7)
        with pytest.raises(EngineBusyError, match=r"^full$"):
            await answered_by(engine)
        await engine.load(ref("x"))
        one.fails["probe"] = EngineError("the probe broke")
        with pytest.raises(EngineError, match=r"^the probe broke$"):
            await engine.probe("x", against=None, prompts=PROMPTS)
        assert engine.replica == "r0"


# -- the set itself ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engines", "said"),
    [
        (list, "are no set"),
        (lambda: [FakeEngine(), FakeEngine()], "each once"),
        (lambda: [FakeEngine(replica="a"), FakeEngine(replica="b", base_sha256="c" * 64)], "different bases"),
    ],
)
async def test_a_set_is_of_different_members_over_one_base(engines: Callable[[], list[FakeEngine]], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ReplicaSet(engines(), probe_prompts=PROMPTS)


async def test_a_member_that_breaks_in_an_unforeseen_way_is_looked_at_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Replica):
        broken = True

        async def list_adapters(self) -> tuple[object, ...]:  # type: ignore[override]
            if self.broken:
                raise ZeroDivisionError
            return await super().list_adapters()

    broken = Broken(replica="r0")
    async with ReplicaSet([broken, Replica(replica="r1")], probe_prompts=PROMPTS, limits=SOON) as engine:
        assert in_service(engine) == {"r1"}
        assert "failed unexpectedly (ZeroDivisionError)" in (await engine.health()).detail
        broken.broken = False
        await all_in_service(engine, 2)
    assert "replica r0 failed unexpectedly" in caplog.text

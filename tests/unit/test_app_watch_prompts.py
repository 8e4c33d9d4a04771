"""Canary prompts through an engine: greedy, under the canary's name, and without an answer where the engine failed."""

from __future__ import annotations

from gate_engine import BASE, ScriptedEngine, adapter, make_grading, make_task
from tidegate.app.watch_prompts import CanaryPrompts
from tidegate.core.types import Release
from tidegate.release import RoutedRelease, Router

CANARY = Release(
    id="m-r2", number=2, adapter_sha256=adapter("m-r1").sha256, base_sha256=BASE, certificate=None, created_at=1.0
)


async def world(skill: float) -> tuple[CanaryPrompts, ScriptedEngine, Router]:
    engine = ScriptedEngine(skill={"m-r1": skill})
    await engine.load(adapter("m-r1"))
    router = Router(model_name="m", episode_ttl_s=1.0, clock=lambda: 0.0)
    router.add(RoutedRelease(release_id="m-r2", adapter="m-r1"), created_at=0.0)
    tasks = [make_task(name) for name in ("one", "two", "three")]
    return CanaryPrompts(tasks, engine=engine, router=router, grading=make_grading()), engine, router


async def test_prompts_are_asked_greedily_under_the_engines_name_of_the_content() -> None:
    prompts, engine, _ = await world(skill=1.0)
    assert await prompts.ask(CANARY, frozenset({"one", "two"})) == {"one": True, "two": True}
    assert {(request.adapter, request.sampling.temperature) for request in engine.requests} == {("m-r1", 0.0)}
    assert prompts.names == {"one", "two", "three"}


async def test_a_wrong_answer_is_one_and_a_failed_call_is_none() -> None:
    prompts, engine, _ = await world(skill=0.0)
    engine.faults["m-r1", "two"] = "error"
    assert await prompts.ask(CANARY, prompts.names) == {"one": False, "three": False}


async def test_a_canary_that_is_not_loaded_answers_nothing() -> None:
    prompts, engine, router = await world(skill=1.0)
    router.remove("m-r2")
    assert await prompts.ask(CANARY, prompts.names) == {}
    assert not engine.requests

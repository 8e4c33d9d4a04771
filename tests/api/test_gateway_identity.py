"""Episodes, users, consent, and declared tasks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway_world import BASE_RELEASE, CALCULATOR, MODEL, NEXT_RELEASE, World, ask

TASK = {"tidegate_verifier": "numeric", "tidegate_reference": "4", "tidegate_kind": "sums"}


@pytest.mark.parametrize(
    ("headers", "fields", "episode"),
    [
        ({"x_tidegate_episode": "from-header"}, {"metadata": {"tidegate_episode": "from-metadata"}}, "from-header"),
        ({}, {"metadata": {"tidegate_episode": "from-metadata"}}, "from-metadata"),
        ({"x_tidegate_episode": ""}, {"metadata": {"tidegate_episode": "from-metadata"}}, "from-metadata"),
    ],
)
async def test_episode_comes_from_header_then_metadata(
    world: World, headers: dict[str, str], fields: dict[str, Any], episode: str
) -> None:
    _, answer_headers, _ = await world.post(ask(**fields), **headers)
    assert answer_headers["x-tidegate-episode"] == episode
    assert world.only_record.episode_id == episode


async def test_without_a_name_a_call_is_its_own_episode(world: World) -> None:
    _, headers, body = await world.post(ask())
    assert headers["x-tidegate-episode"] == body["id"]
    assert world.only_record.episode_id == body["id"]


async def test_user_sources_in_order_of_precedence(world: World) -> None:
    sources: list[tuple[str, dict[str, str], dict[str, Any]]] = [
        ("header", {"x_tidegate_user": "header"}, {"metadata": {"tidegate_user": "metadata"}}),
        ("metadata", {}, {"metadata": {"tidegate_user": "metadata"}, "safety_identifier": "safety"}),
        ("safety", {}, {"safety_identifier": "safety", "user": "user"}),
        ("user", {}, {"user": "user", "metadata": {"tidegate_episode": "episode"}}),
        ("episode", {}, {"metadata": {"tidegate_episode": "episode"}}),
    ]
    for expected, headers, fields in sources:
        world.recorder.interactions.clear()
        await world.post(ask(**fields), **headers)
        assert world.only_record.user_key == f"key-of-{expected}"
    assert world.split_users == [expected for expected, _, _ in sources]


async def test_lines(world: World) -> None:
    await world.post(ask(metadata={"tidegate_line": "side", "tidegate_episode": "a"}))
    assert not world.only_record.main_line
    world.recorder.interactions.clear()
    await world.post(ask(), x_tidegate_line="side")
    assert not world.only_record.main_line
    world.recorder.interactions.clear()
    await world.post(ask(metadata={"tidegate_line": "main"}))
    assert world.only_record.main_line


async def test_store_false_keeps_ids_and_counters_only(world: World) -> None:
    secret = "my secret"
    for stream in (False, True):
        world.recorder.interactions.clear()
        status, _, body = await world.post(
            ask(secret, store=False, stream=stream, stop="zzz", metadata=TASK, user="u", tools=[CALCULATOR])
        )
        assert status == 200
        assert "call_0_0" in json.dumps(body)  # the client still gets its answer
        record = world.only_record
        assert not record.consent
        assert record.messages == ()
        assert record.tools == ()
        assert record.prompt_token_ids == ()
        assert record.task is None
        (choice,) = record.choices
        assert (choice.token_ids, choice.logprobs, choice.text, choice.tool_calls) == ((), (), "", ())
        assert choice.finish_reason == "tool_calls"
        assert record.sampling.stop == ()
        assert record.user_key == "key-of-u"
        assert "secret" not in repr(record)


async def test_store_true_and_absent_mean_consent(world: World) -> None:
    await world.post(ask(store=True))
    assert world.only_record.consent


async def test_a_task_is_declared_on_the_first_call(world: World) -> None:
    await world.post(ask("2+2", tools=[CALCULATOR], metadata={**TASK, "tidegate_environment": "calculator"}))
    task = world.only_record.task
    assert task is not None
    assert task.id.startswith("task-")
    assert task.messages == ({"role": "user", "content": "2+2"},)
    assert task.tools == (CALCULATOR,)
    assert (task.verifier, task.reference, task.kind, task.environment) == ("numeric", 4, "sums", "calculator")


async def test_the_engine_never_sees_the_declaration(world: World) -> None:
    await world.post(ask("2+2", metadata={**TASK, "tidegate_reference": "the-right-answer"}))
    assert "the-right-answer" not in repr(world.engine.requests)
    assert "numeric" not in repr(world.engine.requests)


async def test_later_calls_of_the_episode_declare_nothing(world: World) -> None:
    messages = [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "sure?"},
    ]
    await world.post({"model": MODEL, "messages": messages, "metadata": TASK})
    assert world.only_record.task is None


async def test_a_side_line_call_declares_no_task(world: World) -> None:
    status, _, _ = await world.post(ask("summarise", metadata={**TASK, "tidegate_line": "side"}))
    assert (status, world.only_record.main_line, world.only_record.task) == (200, False, None)


async def test_task_ids_are_content(world: World) -> None:
    bodies = [
        ask("2+2", metadata=TASK),
        ask("2+2", metadata={**TASK, "tidegate_user": "someone"}, temperature=0.5),
        ask("2+3", metadata=TASK),
        ask("2+2", metadata={**TASK, "tidegate_reference": "5"}),
        ask("2+2", metadata={**TASK, "tidegate_verifier": "tool_call"}),
        ask("2+2", metadata=TASK, tools=[CALCULATOR]),
    ]
    for body in bodies:
        await world.post(body)
    ids = [record.task.id for record in world.recorder.interactions.values() if record.task is not None]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 5


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("4", 4),
        ("4.5", 4.5),
        ('{"a": [1]}', {"a": [1]}),
        ("[1, 2]", [1, 2]),
        ('"text"', "text"),
        ("just words", "just words"),
        ("NaN", "NaN"),
        ("1e999", "1e999"),
        ("[1,", "[1,"),
        ('"\\ud800"', '"\\ud800"'),
    ],
)
async def test_references_are_json_else_text(text: str, reference: object) -> None:
    world = World()
    body = ask(metadata={**TASK, "tidegate_reference": text})
    status, _, _ = await world.direct("/v1/chat/completions", json.dumps(body).encode())
    assert status == 200
    task = world.only_record.task
    assert task is not None
    assert task.reference == reference


async def test_a_named_episode_stays_on_its_release_while_it_calls_tools(world: World) -> None:
    metadata = {"tidegate_episode": "agent-run"}
    _, headers, first = await world.post(ask("2+2", tools=[CALCULATOR], metadata=metadata))
    assert headers["x-tidegate-release"] == BASE_RELEASE
    world.router.point_champion_at(NEXT_RELEASE)
    call = first["choices"][0]["message"]["tool_calls"][0]
    messages = [
        {"role": "user", "content": "2+2"},
        first["choices"][0]["message"],
        {"role": "tool", "tool_call_id": call["id"], "content": "4"},
    ]
    body = {"model": MODEL, "messages": messages, "tools": [CALCULATOR], "metadata": metadata}
    side = ask("summarise", metadata={**metadata, "tidegate_line": "side"})
    _, headers, _ = await world.post(side)  # a side call's answer does not end the episode
    assert headers["x-tidegate-release"] == BASE_RELEASE
    _, headers, _ = await world.post(body)
    assert headers["x-tidegate-release"] == BASE_RELEASE
    _, headers, _ = await world.post(ask("next question", metadata=metadata))
    assert headers["x-tidegate-release"] == NEXT_RELEASE


async def test_unnamed_episodes_pin_nothing(world: World) -> None:
    await world.post(ask("2+2", tools=[CALCULATOR]))
    world.router.point_champion_at(NEXT_RELEASE)
    assert not world.router.in_use(BASE_RELEASE)

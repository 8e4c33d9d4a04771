"""Feedback: shapes, targets, and saying a thing twice."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway_world import NOW, World, ask
from tidegate.core.errors import StoreError

PATH = "/v1/feedback"
EPISODE = {"episode_id": "ep-1"}


async def say(world: World, body: dict[str, Any], **headers: str) -> tuple[int, Any]:
    status, _, answer = await world.direct(
        PATH, json.dumps(body).encode(), {k.replace("_", "-"): v for k, v in headers.items()}
    )
    return status, json.loads(answer)


async def test_feedback_on_an_answer_over_http(world: World) -> None:
    _, _, completion = await world.post(ask())
    status, _, body = await world.post(
        {"metric_name": "solved", "value": True, "interaction_id": completion["id"], "tags": {"by": "ci"}}, PATH
    )
    assert status == 200
    assert not body["duplicate"]
    (feedback,) = world.recorder.feedback.values()
    assert feedback.id == body["feedback_id"]
    assert (feedback.metric_name, feedback.value) == ("solved", True)
    assert (feedback.interaction_id, feedback.episode_id) == (completion["id"], None)
    assert feedback.tags == {"by": "ci"}
    assert feedback.created_at == NOW


async def test_inference_id_is_another_name() -> None:
    world = World()
    await world.direct("/v1/chat/completions", json.dumps(ask()).encode())
    interaction_id = world.only_record.id
    status, first = await say(world, {"metric_name": "m", "value": 1.0, "inference_id": interaction_id})
    _, second = await say(world, {"metric_name": "m", "value": 1.0, "interaction_id": interaction_id})
    assert status == 200
    assert second == {"feedback_id": first["feedback_id"], "duplicate": True}


@pytest.mark.parametrize(
    ("value", "kept"), [(True, True), (False, False), (0.25, 0.25), (3, 3.0), (0, 0.0), ("good", "good")]
)
async def test_values(value: object, kept: object) -> None:
    world = World()
    status, _ = await say(world, {"metric_name": "m", "value": value, **EPISODE})
    assert status == 200
    (feedback,) = world.recorder.feedback.values()
    assert feedback.value == kept
    assert type(feedback.value) is type(kept)


async def test_comment_and_demonstration_as_metrics() -> None:
    world = World()
    messages = [{"role": "assistant", "content": "4"}]
    await say(world, {"metric_name": "comment", "value": "too long", **EPISODE})
    await say(world, {"metric_name": "demonstration", "value": messages, **EPISODE})
    comment, demonstration = world.recorder.feedback.values()
    assert (comment.metric_name, comment.value) == ("comment", "too long")
    assert (demonstration.metric_name, demonstration.value) == ("demonstration", messages)
    _, again = await say(world, {"metric_name": "demonstration", "value": "4", **EPISODE})  # the same, in short
    assert again["duplicate"]


async def test_comment_and_demonstration_beside_a_metric() -> None:
    world = World()
    body = {"metric_name": "solved", "value": False, "comment": "wrong sign", "demonstration": "-4", **EPISODE}
    _, answer = await say(world, body)
    kept = {feedback.metric_name: feedback.value for feedback in world.recorder.feedback.values()}
    assert kept == {
        "solved": False,
        "comment": "wrong sign",
        "demonstration": [{"role": "assistant", "content": "-4"}],
    }
    assert world.recorder.feedback[answer["feedback_id"]].metric_name == "solved"
    _, again = await say(world, body)
    assert again["duplicate"]
    status, _ = await say(world, {"comment": "alone", **EPISODE})
    assert status == 200


async def test_saying_it_twice_is_once_and_a_change_is_new() -> None:
    world = World()
    bodies = [
        {"metric_name": "m", "value": 1, **EPISODE},
        {"metric_name": "m", "value": 2, **EPISODE},
        {"metric_name": "m", "value": 1, "tags": {"a": "b"}, **EPISODE},
        {"metric_name": "m2", "value": 1, **EPISODE},
        {"metric_name": "m", "value": 1, "episode_id": "ep-2"},
    ]
    for _ in range(2):
        for body in bodies:
            await say(world, body)
    assert len(world.recorder.feedback) == len(bodies)


async def test_an_idempotency_key_makes_different_words_one() -> None:
    world = World()
    for value, header in ((1, {}), (2, {}), (3, {"idempotency_key": "ignored: the body's key wins"})):
        await say(world, {"metric_name": "m", "value": value, "idempotency_key": "k", **EPISODE}, **header)
    assert [feedback.value for feedback in world.recorder.feedback.values()] == [1.0]
    await say(world, {"metric_name": "m", "value": 5, **EPISODE}, idempotency_key="k")  # header, same key
    assert len(world.recorder.feedback) == 1


async def test_dryrun_checks_and_keeps_nothing() -> None:
    world = World()
    status, body = await say(world, {"metric_name": "m", "value": 1, "dryrun": True, **EPISODE})
    assert (status, body["duplicate"]) == (200, False)
    assert not world.recorder.feedback
    status, _ = await say(world, {"metric_name": "m", "value": [], "dryrun": True, **EPISODE})
    assert status == 400


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"metric_name": "m", "value": 1}, "exactly one of 'interaction_id' and 'episode_id'; neither is given"),
        ({"metric_name": "m", "value": 1, "interaction_id": "a", "episode_id": "b"}, "both are given"),
        ({"metric_name": "m", "value": 1, "interaction_id": "a", "inference_id": "b"}, "send one of them"),
        ({"metric_name": "m", **EPISODE}, "'value' is missing"),
        ({"value": 1, **EPISODE}, "'metric_name' is missing"),
        ({**EPISODE}, "feedback says nothing"),
        ({"metric_name": "", "value": 1, **EPISODE}, "at least 1 character"),
        ({"metric_name": "m", "value": {}, **EPISODE}, "a value is true, false, a number"),
        ({"metric_name": "m", "value": None, **EPISODE}, "a value is true, false, a number"),
        ({"metric_name": "m", "value": 10**400, **EPISODE}, "a number up to 2^53"),
        ({"metric_name": "m", "value": [1], **EPISODE}, "only metric 'demonstration' has"),
        ({"metric_name": "comment", "value": 1, **EPISODE}, "it is a string"),
        ({"metric_name": "comment", "value": "a", "comment": "b", **EPISODE}, "as a metric and as a field"),
        ({"metric_name": "demonstration", "value": 1, **EPISODE}, "non-empty list of messages"),
        ({"metric_name": "demonstration", "value": [], **EPISODE}, "non-empty list of messages"),
        ({"metric_name": "demonstration", "value": [{"role": "king"}], **EPISODE}, "is not usable"),
        ({"demonstration": [5], **EPISODE}, "is not usable"),
        ({"metric_name": "m", "value": 1, "tags": {"a": 1}, **EPISODE}, "'tags.a' is 1"),
        ({"metric_name": "m", "value": 1, "tags": [], **EPISODE}, "'tags' is []"),
        ({"metric_name": "m", "value": 1, "dryrun": "no", **EPISODE}, "'dryrun' is 'no'"),
    ],
)
async def test_malformed_feedback_is_told_what_is_accepted(body: dict[str, Any], told: str) -> None:
    world = World()
    status, answer = await say(world, body)
    assert status == 400
    assert told in answer["error"]["message"]
    assert not world.recorder.feedback


async def test_an_unknown_interaction_is_404() -> None:
    status, answer = await say(World(), {"metric_name": "m", "value": 1, "interaction_id": "chatcmpl-none"})
    assert status == 404
    assert "'chatcmpl-none' is not recorded here" in answer["error"]["message"]
    assert answer["error"]["param"] == "interaction_id"


@pytest.mark.parametrize("failure", [StoreError("the disk is full"), OSError("boom")])
async def test_a_store_that_fails_is_503(failure: Exception) -> None:
    world = World()
    world.recorder.failure = failure
    status, headers, answer = await world.direct(PATH, b'{"metric_name": "m", "value": 1, "episode_id": "e"}')
    assert status == 503
    assert headers["retry-after"] == "1"
    assert json.loads(answer)["error"]["code"] == "store_unavailable"

"""A request may have several choices sampled and gets one; the record holds all of them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from openai import BadRequestError

from fake_engine import END_TOKEN, FakeEngine, token_id
from gateway_world import CALCULATOR, World, ask, running_world, until
from tidegate.config.settings import ServerSettings
from tidegate.core.errors import ConfigError
from tidegate.core.types import (
    ChoiceEnd,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    JsonObject,
    Outcome,
    Task,
    TokenDelta,
)
from tidegate.ports.signals import VERIFIER_ERROR, Judgement

BEST, MAJORITY = {"x-tidegate-search": "best-of-4"}, {"x-tidegate-search": "majority-of-4"}
TASK = {"tidegate_verifier": "numeric", "tidegate_reference": "4"}
ANSWERS = ("it is 5", "It is 4.", "it is 4", "6")


@dataclass
class Several(FakeEngine):
    """Choice i says ``answers[i]``, or calls the first tool with i where that is empty."""

    answers: Sequence[str] = ANSWERS

    async def _choices(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        for choice in range(request.sampling.n):
            await self._pause(choice + 1)
            text = self.answers[choice % len(self.answers)]
            for word in [word + " " for word in text.split(" ")[:-1]] + text.split(" ")[-1:]:
                yield TokenDelta(
                    choice=choice, token_ids=(token_id(word),), logprobs=(-0.25,), text=word, token_texts=(word,)
                )
            if not text:
                call = {"name": "calculator", "arguments": f'{{"i": {choice // 2}}}'}
                made = {"id": f"call_{choice}", "type": "function", "function": call}
                yield TokenDelta(choice=choice, token_ids=(), logprobs=(), tool_calls=(made,))
            yield TokenDelta(choice=choice, token_ids=(END_TOKEN,), logprobs=(-0.125,), token_texts=("",))
            yield ChoiceEnd(choice=choice, finish_reason=FinishReason.STOP if text else FinishReason.TOOL_CALLS)


@dataclass
class Judges:
    """A verifier: right where the last message holds the reference; ``breaks_on`` makes it raise or abstain there."""

    breaks_on: str | None = None
    how: str = "raise"
    hangs: threading.Event | None = None
    seen: list[Sequence[JsonObject]] = field(default_factory=list)

    def __call__(self, task: Task, transcript: Sequence[JsonObject]) -> Judgement:
        self.seen.append(transcript)
        text = str(transcript[-1]["content"])
        if self.hangs is not None and len(self.seen) == 3:
            assert self.hangs.wait(30)
        if self.breaks_on is not None and self.breaks_on in text:
            if self.how == "raise":
                raise ZeroDivisionError("odd answer")
            if self.how == "away":
                raise ConfigError("not installed here")
            detail = VERIFIER_ERROR if self.how == "marked" else "no idea"
            outcome = Outcome.FAIL if self.how == "marked" else Outcome.ABSTAIN
            return Judgement(outcome=outcome, score=0.0, detail=detail)
        right = str(task.reference) in text
        return Judgement(outcome=Outcome.PASS if right else Outcome.FAIL, score=float(right), detail="right")


def search_world(judges: Judges | None = None, **parts: Any) -> Any:
    options: dict[str, Any] = {"engine": Several(), **parts}
    return running_world(**options, judge=judges or Judges())


def counted(world: World) -> dict[str, float]:
    text = world.app_metrics.render().decode()
    lines = [
        line.rpartition(" ") for line in text.splitlines() if line.startswith("tidegate_search") and "total" in line
    ]
    return {name.removeprefix("tidegate_search"): float(value) for name, _, value in lines}


async def test_best_of_n_delivers_what_the_verifier_scores_highest_and_records_all() -> None:
    async with search_world() as world, world.client() as client:
        raw = await client.chat.completions.with_raw_response.create(**ask("2+2?", metadata=TASK), extra_headers=BEST)
        answer = raw.parse()
        record = world.only_record
    (choice,) = answer.choices
    assert (choice.index, choice.message.content) == (0, "It is 4.")
    told = {name: raw.headers[f"x-tidegate-search{name}"] for name in ("", "-choice", "-support")}
    assert told == {"": "best-of-4", "-choice": "1", "-support": "2"}
    assert (record.sampling.n, record.sampling.search) == (4, "best-of-4")
    assert [one.delivered for one in record.choices] == [False, True, False, False]
    assert [one.text for one in record.choices] == list(ANSWERS)
    assert all(len(one.token_ids) == len(one.logprobs) > 0 and one.token_exact for one in record.choices)
    assert record.task is not None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(one.token_ids) for one in record.choices) == 14
    assert counted(world) == {
        'es_total{kind="best"}': 1.0, '_choices_total{result="failed"}': 2.0, '_choices_total{result="passed"}': 2.0,
    }  # fmt: skip


async def test_a_search_judges_by_the_task_that_is_recorded() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    judged: list[Task] = []

    class Noting(Judges):
        def __call__(self, task: Task, transcript: Sequence[JsonObject]) -> Judgement:
            judged.append(task)
            return super().__call__(task, transcript)

    async with search_world(Noting()) as world:
        status, _, _ = await world.post(ask("2+2?", metadata=TASK, tools=[tool], tool_choice="required"), **BEST)
        record = world.only_record
    assert status == 200
    assert record.task is not None
    assert {task.id for task in judged} == {record.task.id}


async def test_the_majority_needs_no_verifier_and_counts_normalised_answers() -> None:
    async with search_world() as world:
        _, headers, body = await world.post(ask("2+2?"), **MAJORITY)
    assert body["choices"][0]["message"]["content"] == "It is 4."
    assert (headers["x-tidegate-search-choice"], headers["x-tidegate-search-support"]) == ("1", "2")


async def test_tool_calls_vote_by_what_they_call() -> None:
    async with search_world(engine=Several(answers=("text", "", "", ""))) as world:
        _, headers, body = await world.post(ask("2+2?", tools=[CALCULATOR]), **MAJORITY)
    (call,) = body["choices"][0]["message"]["tool_calls"]
    assert (call["id"], headers["x-tidegate-search-support"]) == ("call_2", "2")
    assert body["choices"][0]["finish_reason"] == "tool_calls"


async def test_where_everybody_abstains_the_first_choice_goes_out() -> None:
    async with search_world(engine=Several(answers=(" ",))) as world:
        _, headers, _ = await world.post(ask("2+2?"), **MAJORITY)
    assert (headers["x-tidegate-search-choice"], headers["x-tidegate-search-support"]) == ("0", "0")


async def test_metadata_asks_too_and_the_header_wins() -> None:
    async with search_world() as world:
        asked = ask("2+2?", metadata={"tidegate_search": "majority-of-3"})
        assert (await world.post(asked))[1]["x-tidegate-search"] == "majority-of-3"
        assert (await world.post(asked, x_tidegate_search="majority-of-2"))[1]["x-tidegate-search"] == "majority-of-2"


async def test_a_stream_sends_nothing_before_the_choice_and_one_choice_after_it() -> None:
    engine = Several(hold_at=4)
    async with search_world(engine=engine) as world, world.client() as client:
        request = client.chat.completions.create(
            **ask("2+2?", metadata=TASK), extra_headers=BEST, stream=True, stream_options={"include_usage": True}
        )
        task = asyncio.ensure_future(request)
        await until(lambda: engine.holding == 1)
        assert not task.done()  # not even the response's head
        engine.go.set()
        stream = await task
        assert stream.response.headers["x-tidegate-search-choice"] == "1"
        chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "It is 4."
    assert {c.choices[0].index for c in chunks if c.choices} == {0}
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 14


async def test_log_probabilities_and_ids_are_those_of_the_delivered_choice() -> None:
    async with search_world() as world:
        _, _, body = await world.post(ask("2+2?", logprobs=True, return_token_ids=True, metadata=TASK), **BEST)
    (choice,) = body["choices"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["It ", "is ", "4.", ""]
    assert choice["token_ids"] == [*map(token_id, ("It ", "is ", "4.")), END_TOKEN]


@pytest.mark.parametrize(
    ("headers", "fields", "says"),
    [
        ({"x-tidegate-search": "best-of-9"}, {"metadata": TASK}, "N from 2 to 8"),
        ({"x-tidegate-search": "best-of-1"}, {"metadata": TASK}, "N from 2 to 8"),
        ({"x-tidegate-search": "best-of-08"}, {"metadata": TASK}, "'best-of-N' and 'majority-of-N'"),
        ({"x-tidegate-search": "worst-of-4"}, {}, "'best-of-N' and 'majority-of-N'"),
        (BEST, {}, "declares no task"),
        (BEST, {"metadata": {**TASK, "tidegate_line": "side"}}, "side line"),
        (BEST, {"metadata": {**TASK, "tidegate_verifier": "nobody"}}, "unknown"),
        (MAJORITY, {"n": 2}, "'n' is 2"),
        (MAJORITY, {"temperature": 0.0}, "all choices would be the same"),
    ],
)
async def test_a_search_that_cannot_be_done_is_refused(
    headers: dict[str, str], fields: dict[str, Any], says: str
) -> None:
    async with search_world() as world, world.client() as client:
        with pytest.raises(BadRequestError, match=says) as refused:
            await client.chat.completions.create(**ask("2+2?", **fields), extra_headers=headers)
        assert refused.value.type == "invalid_request_error"
        assert world.engine.requests == []


async def test_a_server_that_does_not_search_says_so() -> None:
    async with search_world(settings=ServerSettings(max_search=0)) as world:
        status, _, body = await world.post(ask("2+2?"), **MAJORITY)
    assert (status, body["error"]["param"]) == (400, "x-tidegate-search")
    assert "server.max_search" in body["error"]["message"]


@pytest.mark.parametrize("how", ["raise", "away", "abstain", "marked"])
async def test_a_verifier_that_fails_on_a_choice_costs_that_choice_alone(how: str) -> None:
    """It breaks on the right answers, and unverified ones come behind those that it calls wrong."""
    async with search_world(Judges(breaks_on="4", how=how)) as world:
        _, headers, body = await world.post(ask("2+2?", metadata=TASK), **BEST)
        assert counted(world)['_choices_total{result="unverified"}'] == 2.0
    assert body["choices"][0]["message"]["content"] == "it is 5"
    assert headers["x-tidegate-search-support"] == "0"


async def test_a_verifier_that_hangs_is_not_waited_for() -> None:
    judges = Judges(hangs=threading.Event())
    async with search_world(judges, settings=ServerSettings(search_verify_s=0.2)) as world:
        _, headers, body = await world.post(ask("2+2?", metadata=TASK), **BEST)
        assert counted(world)['_choices_total{result="unverified"}'] == 2.0
        judges.hangs.set()
    assert body["choices"][0]["message"]["content"] == "It is 4."
    assert headers["x-tidegate-search-support"] == "1"


async def test_verifiers_that_hang_for_good_end_verifying_and_not_answering() -> None:
    class Hanging(Judges):
        def __call__(self, task: Task, transcript: Sequence[JsonObject]) -> Judgement:
            self.seen.append(transcript)
            assert self.hangs is not None
            self.hangs.wait(30)
            return super().__call__(task, transcript)

    judges = Hanging(hangs=threading.Event())
    async with search_world(judges, settings=ServerSettings(search_verify_s=0.05)) as world:
        for _ in range(5):
            status, _, body = await world.post(ask("2+2?", metadata=TASK), **BEST)
            assert (status, body["choices"][0]["message"]["content"]) == (200, "it is 5")
        assert len(judges.seen) == 4  # a thread each, and no fifth
        judges.hangs.set()


async def test_a_search_that_fails_is_an_error_and_what_was_sampled_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(choices: Any) -> Any:
        raise ZeroDivisionError(choices)

    monkeypatch.setattr("tidegate.gateway.searching.pick_majority", broken)
    async with search_world() as world:
        status, _, body = await world.post(ask("2+2?"), **MAJORITY)
        assert (status, body["error"]["code"]) == (500, "internal_error")
        assert [one.text for one in world.only_record.choices] == list(ANSWERS)
        assert not any(one.delivered for one in world.only_record.choices)


async def test_a_verifier_that_takes_the_time_of_the_whole_request_is_no_fault_of_the_release() -> None:
    judges = Judges(hangs=threading.Event())
    settings = ServerSettings(request_timeout_s=0.2, search_verify_s=30.0)
    async with search_world(judges, settings=settings) as world:
        status, _, _ = await world.post(ask("2+2?", metadata=TASK), **BEST)
        judges.hangs.set()
    assert status == 504
    assert [at_fault for _, _, at_fault in world.observed] == [False]


async def test_a_later_call_of_an_episode_is_judged_as_what_its_first_one_declared() -> None:
    judges = Judges()
    turns = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "let me see"},
        {"role": "user", "content": "well?"},
    ]
    async with search_world(judges) as world:
        _, _, body = await world.post({"model": "tiny", "messages": turns, "metadata": TASK}, **BEST)
        assert world.only_record.task is None
    assert body["choices"][0]["message"]["content"] == "It is 4."
    assert [message["content"] for message in judges.seen[1]] == ["let me see", "well?", "It is 4."]


async def test_a_search_that_is_cut_short_delivered_nothing() -> None:
    engine = Several(hold_at=4)
    async with search_world(engine=engine, settings=ServerSettings(request_timeout_s=0.2)) as world:
        status, headers, _ = await world.post(ask("2+2?", metadata=TASK), **BEST)
        record = world.only_record
    assert status == 504
    assert "x-tidegate-search" not in headers
    assert [one.delivered for one in record.choices] == [False] * 4
    assert {one.finish_reason for one in record.choices} == {FinishReason.CANCELLED}
    assert record.choices[0].text == "it is 5"


async def test_a_repeated_request_gets_the_choice_that_was_delivered() -> None:
    async with search_world() as world:
        first = await world.post(ask("2+2?", metadata=TASK), idempotency_key="k", **BEST)
        again = await world.post(ask("2+2?", metadata=TASK), idempotency_key="k", **BEST)
        plain = await world.post(ask("2+2?", metadata=TASK), idempotency_key="k")
    assert again[2] == first[2]
    assert again[1]["x-tidegate-replayed"] == "true"
    assert (again[1]["x-tidegate-search"], again[1]["x-tidegate-search-choice"]) == ("best-of-4", "1")
    assert plain[2]["id"] != first[2]["id"]  # the key was used for another question
    assert plain[2]["choices"][0]["message"]["content"] == "it is 5"
    assert len(world.engine.requests) == 2


async def test_without_consent_only_what_was_delivered_is_marked() -> None:
    async with search_world() as world:
        await world.post(ask("2+2?", metadata=TASK, store=False), **BEST)
        record = world.only_record
    assert [(one.text, one.delivered) for one in record.choices] == [("", False), ("", True), ("", False), ("", False)]


async def test_an_upstream_is_asked_for_the_choices_in_its_own_field() -> None:
    async with search_world(passes_fields_on=True) as world:
        await world.post(ask("2+2?", temperature=0.5), **MAJORITY)
        (request,) = world.engine.requests
    assert request.passed is not None
    assert (request.passed["n"], request.passed["temperature"]) == (4, 0.5)


async def test_json_of_the_wire_holds_one_choice() -> None:
    async with search_world() as world:
        _, _, text = await world.post(ask("2+2?", metadata=TASK, stream=True), **BEST)
    events = [json.loads(e.removeprefix("data: ")) for e in text.split("\n\n")[:-2]]
    assert sum(event["choices"][0]["delta"].get("role") == "assistant" for event in events) == 1

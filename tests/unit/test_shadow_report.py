"""What a report on a shadow says of pairs, from their records alone; and what the log says of shadows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from store_samples import interaction, shadow_answer
from tidegate.app.shadows import passed
from tidegate.cli.shadows import rows
from tidegate.core.audit import next_record
from tidegate.core.errors import AuditError
from tidegate.core.shadow import (
    SHADOW_ENDED,
    SHADOW_STARTED,
    Shadow,
    ShadowOutcome,
    ShadowPair,
    ended_body,
    last_run,
    started_body,
)
from tidegate.core.shadow_report import calls_by_outcome, comparisons
from tidegate.core.statistics import tango_interval
from tidegate.core.types import AuditRecord, Choice, JsonObject, Sampling, Task
from tidegate.signals import builtin_verifiers

GREEDY, SAMPLED = Sampling(temperature=0.0), Sampling(temperature=1.0)
_NUMBERS = itertools.count()


def call(name: str = "calc", arguments: str = '{"a": 1}', id_: str = "call_1") -> JsonObject:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def pair(
    main: str = "four",
    shadow: str | None = "four",
    *,
    main_calls: Sequence[JsonObject] = (),
    shadow_calls: Sequence[JsonObject] = (),
    sampling: Sampling = SAMPLED,
    task: Task | None = None,
    release: str = "m-r1",
    tokens: int = 4,
    **changes: Any,
) -> ShadowPair:
    """A pair of texts; ``shadow`` None failed."""
    id_ = f"i{next(_NUMBERS)}"
    invalid = changes.pop("main_invalid", False)
    choice = Choice(
        index=0, token_ids=tuple(range(tokens)), logprobs=(-1.0,) * tokens, text=main, tool_calls=tuple(main_calls),
        invalid_tool_call=invalid,
    )  # fmt: skip
    messages = ({"role": "user", "content": "2+2?"},) if task is None else task.messages
    record = interaction(
        id_, episode=id_, choices=(choice,), sampling=sampling, task=task, release_id=release, messages=messages
    )
    said: dict[str, Any] = {"text": shadow, "tool_calls": tuple(shadow_calls), "completion_tokens": 2}
    if shadow is None:
        said = {"outcome": ShadowOutcome.FAILED, "reason": "engine_timeout", "text": "", "tool_calls": ()}
    answer = shadow_answer(id_, **{"invalid_tool_call": False, **said, **changes})
    return ShadowPair(main=record, answer=answer)


def only(pairs: Sequence[ShadowPair], judged: dict[str, tuple[bool, bool]] | None = None) -> JsonObject:
    (comparison,) = comparisons(pairs, judged or {})
    return comparison


def test_equal_answers_are_counted_and_of_greedy_calls_apart() -> None:
    pairs = [
        pair(),
        pair(shadow="five"),
        pair(sampling=GREEDY),
        pair("", "", main_calls=[call()], shadow_calls=[call(arguments='{ "a":1 }', id_="call_7")], sampling=GREEDY),
        pair("", "", main_calls=[call()], shadow_calls=[call(arguments='{"a": 2}')], sampling=GREEDY),
        pair("", "four", main_calls=[call()]),
        pair("", "", main_calls=[call(arguments="{")], shadow_calls=[call(arguments="{")]),
    ]
    found = only(pairs)
    assert found["pairs"] == 7
    assert found["identical"] == {"of": 7, "count": 4}
    assert found["identical_greedy"] == {"of": 3, "count": 2}
    assert found["same_tool_calls"] == {"of": 4, "count": 2}


def test_rates_come_with_the_interval_of_their_paired_difference() -> None:
    pairs = [
        pair("", "four"),
        pair(" \n", ""),
        pair("four", "", main_invalid=True),
        pair(shadow="", shadow_calls=[call()], invalid_tool_call=True),
        *(pair() for _ in range(6)),
    ]
    found = only(pairs)
    assert found["no_reply"] == {
        "of": 10, "main": 2, "shadow": 2, "difference": 0.0, "interval": list(tango_interval(1, 1, 10)),
    }  # fmt: skip
    assert found["invalid_tool_call"] == {
        "of": 10, "main": 1, "shadow": 1, "difference": 0.0, "interval": list(tango_interval(1, 1, 10)),
    }  # fmt: skip
    worse = only([pair("four", "") for _ in range(8)])["no_reply"]
    assert worse["difference"] == 1.0
    assert 0.0 < worse["interval"][0] < worse["interval"][1] == 1.0


def test_failures_of_the_shadow_are_of_all_that_it_was_asked_and_no_pairs() -> None:
    found = only([pair(shadow=None), pair(), pair(), pair()])
    assert found["pairs"] == found["identical"]["of"] == found["no_reply"]["of"] == 3
    assert found["failed"] == {
        "of": 4, "main": 0, "shadow": 1, "difference": 0.25, "interval": list(tango_interval(1, 0, 4)),
        "reasons": {"engine_timeout": 1},
    }  # fmt: skip


def test_medians_are_of_pairs_in_which_both_are_known() -> None:
    found = only([pair(tokens=n, seconds=n / 8) for n in (1, 3, 5)] + [pair(tokens=100, completion_tokens=None)])
    assert found["completion_tokens"] == {"of": 3, "main": 3.0, "shadow": 2.0}
    assert found["seconds"] == {"of": 4, "main": 0.25, "shadow": 0.25}
    nothing = only([pair(shadow=None)])
    assert nothing["seconds"] == {"of": 0, "main": None, "shadow": None}
    assert nothing["no_reply"] == {"of": 0, "main": 0, "shadow": 0}


def test_releases_that_served_meanwhile_are_compared_apart() -> None:
    found = comparisons([pair(), pair(release="m-r2"), pair(shadow="five")], {})
    assert [(one["main"], one["pairs"], one["identical"]["count"]) for one in found] == [("m-r1", 2, 1), ("m-r2", 1, 1)]
    assert comparisons([], {}) == []


def test_calls_are_counted_by_their_end() -> None:
    counts = {
        (ShadowOutcome.ANSWERED, ""): 5,
        (ShadowOutcome.DROPPED, "busy"): 2,
        (ShadowOutcome.DROPPED, "limit"): 1,
        (ShadowOutcome.FAILED, "engine_failed"): 3,
    }
    assert calls_by_outcome(counts) == {
        "answered": 5, "failed": {"engine_failed": 3}, "dropped": {"busy": 2, "limit": 1},
    }  # fmt: skip
    assert calls_by_outcome({}) == {"answered": 0, "failed": {}, "dropped": {}}


def numeric(**changes: Any) -> Task:
    fields: dict[str, Any] = {
        "id": "t", "messages": ({"role": "user", "content": "2+2?"},), "verifier": "numeric_answer", "reference": 4,
    }  # fmt: skip
    return Task(**{**fields, **changes})


def test_a_declared_task_of_one_call_is_judged_for_both_alike() -> None:
    right, wrong = "the answer is 4", "the answer is 5"
    tried = [
        pair(right, wrong, task=numeric()),
        pair(wrong, right, task=numeric()),
        pair(right, right, task=numeric()),
        pair(right, right),
        pair(right, right, task=numeric(environment="calculator")),
        pair(right, right, task=numeric(verifier="nobody")),
        pair(right, None, task=numeric()),
        pair(right, right, task=numeric(), invalid_tool_call=True),
    ]
    judged = passed(tried, builtin_verifiers(), clock=lambda: 0.0)
    found = [judged.get(one.main.id) for one in tried]
    assert found == [(True, False), (False, True), (True, True), None, None, None, None, (True, False)]
    assert only(tried, judged)["passed"] == {
        "of": 4, "main": 3, "shadow": 2, "difference": -0.25, "interval": list(tango_interval(1, 2, 4)),
    }  # fmt: skip


def test_a_comparison_is_a_table_for_people() -> None:
    for found in (only([pair(), pair(shadow="")]), only([pair(shadow=None)])):
        table = rows(found)
        assert {len(row) for row in table} == {6}
        assert [row[0] for row in table] == [
            "median seconds", "median completion_tokens", "failed", "invalid_tool_call", "no_reply", "passed",
            "identical", "identical_greedy", "same_tool_calls",
        ]  # fmt: skip


def test_a_share_is_drawn_anew_by_each_shadow_and_the_same_by_each_call() -> None:
    ids = [f"chatcmpl-{n}" for n in range(4000)]
    first = {id_ for id_ in ids if Shadow(id="shadow-1", release_id="r", share=0.1).takes(id_)}
    again = {id_ for id_ in ids if Shadow(id="shadow-1", release_id="other", share=0.1).takes(id_)}
    other = {id_ for id_ in ids if Shadow(id="shadow-2", release_id="r", share=0.1).takes(id_)}
    assert first == again
    assert 320 < len(first) < 480
    assert len(first & other) < 80
    assert all(Shadow(id="shadow-1", release_id="r", share=1.0).takes(id_) for id_ in ids)


def log(*entries: tuple[str, JsonObject]) -> list[AuditRecord]:
    records: list[AuditRecord] = []
    for time, (kind, body) in enumerate(entries):
        records.append(next_record(records[-1] if records else None, kind=kind, body=body, time=float(time)))
    return records


def test_the_log_says_which_shadow_runs() -> None:
    one, two = (Shadow(id=f"shadow-{n}", release_id=f"r{n}", share=n / 4) for n in (1, 2))
    started = [(SHADOW_STARTED, started_body(each, adapter_sha256=None, base_sha256="b")) for each in (one, two)]
    assert last_run(log()) is None
    run = last_run(log(("note", {}), started[0]))
    assert run is not None
    assert (run.shadow, run.number, run.started_at, run.ended) == (one, 1, 1.0, None)
    run = last_run(log(started[0], (SHADOW_ENDED, ended_body(one, "a")), (SHADOW_ENDED, ended_body(one, "b"))))
    assert run is not None
    assert run.ended == "a"
    run = last_run(
        log(started[0], (SHADOW_ENDED, ended_body(one, "a")), started[1], (SHADOW_ENDED, ended_body(one, "c")))
    )
    assert run is not None
    assert (run.shadow, run.number, run.ended) == (two, 2, None)


@pytest.mark.parametrize("body", [{}, {"shadow": "s", "release": "r", "share": "much"}])
def test_a_malformed_record_is_named(body: JsonObject) -> None:
    with pytest.raises(AuditError, match="record 1 of kind 'shadow_started'"):
        last_run(log((SHADOW_STARTED, body)))

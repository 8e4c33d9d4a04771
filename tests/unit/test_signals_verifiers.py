"""Each verifier on right, wrong and missing answers; nothing a model writes may raise or abstain."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest

from tidegate.core.types import JsonObject, Outcome, Task
from tidegate.signals.numbers import find_numbers, parse_number
from tidegate.signals.verifiers import ExactText, NumericAnswer, ReasoningGym, ToolCall, builtin_verifiers
from tidegate.signals.verifiers.findings import reason_of


def task(verifier: str, reference: Any) -> Task:
    return Task(id="t", messages=({"role": "user", "content": "?"},), verifier=verifier, reference=reference)


def says(text: Any) -> list[JsonObject]:
    return [{"role": "assistant", "content": text}]


def calls(*functions: tuple[str, Any]) -> list[JsonObject]:
    return [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": f"call_{index}",
                    "type": "function",
                    "function": {"name": name, "arguments": args if isinstance(args, str) else json.dumps(args)},
                }
                for index, (name, args) in enumerate(functions)
            ],
        }
    ]


REFERENCES: dict[str, Any] = {
    "exact_text": "42",
    "numeric_answer": 42,
    "reasoning_gym": {"dataset": "chain_sum", "entry": {"answer": "42"}},
    "tool_call": [{"f": {"x": [42]}}],
}

NO_ANSWERS: dict[str, tuple[Sequence[JsonObject], str]] = {
    "nothing": ([], "no_reply"),
    "empty text": (says(""), "no_reply"),
    "blank text": (says(" \n"), "no_reply"),
    "null content": (says(None), "no_reply"),
    "image part": (says([{"type": "image_url", "image_url": {"url": "x"}}]), "no_reply"),
    "unparsed call": (says('<tool_call>{"name": "f", "arguments": {"x": 42'), "invalid_tool_call"),
    "arguments are no JSON": (calls(("f", "{42")), "invalid_tool_call"),
    "arguments are a list": (calls(("f", [42])), "invalid_tool_call"),
}


@pytest.mark.parametrize("case", NO_ANSWERS)
@pytest.mark.parametrize("name", REFERENCES)
def test_signals_missing_answers_and_invalid_calls_fail_and_say_why(name: str, case: str) -> None:
    transcript, reason = NO_ANSWERS[case]
    judgement = builtin_verifiers()[name].judge(task(name, REFERENCES[name]), transcript)
    assert (judgement.outcome, judgement.score) == (Outcome.FAIL, 0.0)
    assert reason_of(judgement.detail) == reason


@pytest.mark.parametrize("name", ["exact_text", "numeric_answer", "reasoning_gym"])
def test_signals_an_invalid_call_before_a_right_answer_fails(name: str) -> None:
    transcript = [*says("<tool_call>42"), {"role": "user", "content": "?"}, *says("42")]
    judgement = builtin_verifiers()[name].judge(task(name, REFERENCES[name]), transcript)
    assert reason_of(judgement.detail) == "invalid_tool_call"


@pytest.mark.parametrize("name", ["exact_text", "numeric_answer", "reasoning_gym"])
@pytest.mark.parametrize(
    "ending", [calls(("calculator", {"expression": "42"})), [*says("42"), {"role": "tool", "content": "42"}]]
)
def test_signals_an_episode_that_ends_without_a_text_has_no_reply(name: str, ending: list[JsonObject]) -> None:
    judgement = builtin_verifiers()[name].judge(task(name, REFERENCES[name]), ending)
    assert reason_of(judgement.detail) == "no_reply"


def test_signals_the_registry_names_its_verifiers_with_versions() -> None:
    for name, verifier in builtin_verifiers().items():
        assert verifier.name == name
        assert verifier.version
        verifier.check_reference(REFERENCES[name])


# --- numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("no number", []),
        ("42", [42]),
        ("It is 42.", [42]),
        ("-7.50", ["-7.5"]),
        ("\u22127", [-7]),
        ("+7", [7]),
        ("$1,234.50", ["1234.5"]),
        ("-$5 and $-6", [-5, -6]),
        ("1,234,567", [1234567]),
        ("1,23", [1, 23]),
        ("50%", [50]),
        ("3/4", ["3/4"]),
        ("3 / 4", [3, 4]),
        ("-1/2", ["-1/2"]),
        ("10-5", [10, 5]),
        ("(3)-5", [3, 5]),
        ("2 - 5 = -3", [2, 5, -3]),
        ("2--5", [2, -5]),
        ("x=-5", [-5]),
        (".5", ["1/2"]),
        ("answer...42", [42]),
        ("1e3", [1000]),
        ("5kg of A4", [5]),
        ("**42** _43_ \\boxed{44}", [42, 43, 44]),
        ("1/0", [None]),
        ("9" * 101, [None]),
    ],
)
def test_signals_numbers_are_read_as_people_write_them(text: str, numbers: list[Any]) -> None:
    assert find_numbers(text) == [None if number is None else Fraction(number) for number in numbers]


def test_signals_a_number_alone_is_parsed_and_anything_beside_it_refused() -> None:
    assert parse_number(" 1,250 ") == 1250
    assert parse_number("12%") == 12
    assert parse_number("12 apples") is None
    assert parse_number("") is None


# --- numeric_answer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "text", "passed"),
    [
        (36, "36", True),
        ("36", "So 20 + 16 = 36.", True),
        ("36", "36 of 100", False),
        ("1,250", "$1250.00", True),
        (-3, "-3", True),
        (-3, "3", False),
        ("3/4", "0.75", True),
        (0.1, "1/10", True),
        (0.3333333333, "0.333333", True),
        (0.3333, "0.34", False),
        (1_000_000, "1000001", False),
        (1_000_000.5, "1000001", True),
        ({"answer": 10, "tolerance": 0.05}, "10.4", True),
        ({"answer": 10, "tolerance": 0.05}, "10.6", False),
        ({"answer": 10, "exactly_one": True}, "5 + 5 = 10", False),
        ({"answer": 10, "exactly_one": True}, "ten: 10", True),
        (10, "ten", False),
        (10, f"10 {'9' * 101}", False),
    ],
)
def test_signals_numeric_answer_compares_the_last_number(reference: Any, text: str, passed: bool) -> None:
    verifier = NumericAnswer()
    verifier.check_reference(reference)
    judgement = verifier.judge(task("numeric_answer", reference), says(text))
    assert judgement.outcome is (Outcome.PASS if passed else Outcome.FAIL)
    assert reason_of(judgement.detail) == ("right" if passed else "wrong")


@pytest.mark.parametrize(
    "reference", [None, True, "many", "", [1], {}, {"answer": "x"}, {"answer": 1, "tolerance": -1},
                  {"answer": 1, "exactly_one": 1}, {"answer": 1, "tol": 1}, float("nan"), float("inf")]
)  # fmt: skip
def test_signals_numeric_answer_refuses_other_references(reference: Any) -> None:
    with pytest.raises(ValueError, match="a finite number"):
        NumericAnswer().check_reference(reference)


# --- exact_text ---------------------------------------------------------------------------------------------


def test_signals_exact_text_ignores_only_blanks_around() -> None:
    verifier = ExactText()
    assert verifier.judge(task("exact_text", "Paris "), says(" Paris\n")).outcome is Outcome.PASS
    assert verifier.judge(task("exact_text", "Paris"), says("paris")).outcome is Outcome.FAIL
    for reference in (None, 3, " "):
        with pytest.raises(ValueError, match="not blank"):
            verifier.check_reference(reference)


# --- tool_call ----------------------------------------------------------------------------------------------

AREA = [{"area": {"base": [10], "height": [5.0], "unit": ["Square Meters", "m2", ""]}}]


@pytest.mark.parametrize(
    ("reference", "made", "reason"),
    [
        (AREA, [("area", {"base": 10, "height": 5})], "right"),
        (AREA, [("area", {"base": 10.0, "height": 5, "unit": "square-meters"})], "right"),
        (AREA, [("area", {"base": 10, "height": 5, "unit": ""})], "right"),
        (AREA, [("area", {"base": 10, "height": 5, "unit": "km"})], "wrong"),
        (AREA, [("area", {"base": 10})], "wrong"),
        (AREA, [("area", {"base": "10", "height": 5})], "wrong"),
        (AREA, [("area", {"base": 10, "height": 5, "colour": "red"})], "wrong"),
        (AREA, [("volume", {"base": 10, "height": 5})], "wrong"),
        (AREA, [("area", {"base": 10, "height": 5})] * 2, "wrong"),
        ([{"f": {"on": [True]}}], [("f", {"on": True})], "right"),
        ([{"f": {"on": [True]}}], [("f", {"on": 1})], "wrong"),
        ([{"f": {"n": [1]}}], [("f", {"n": True})], "wrong"),
        ([{"f": {"n": [None]}}], [("f", {"n": None})], "right"),
        ([{"f": {"n": [None]}}], [("f", {"n": 0})], "wrong"),
        ([{"f": {"who": ["O'Neil"]}}], [("f", {"who": 'o"neil'})], "right"),
        ([{"f": {"xs": [[1, 2], ["A b"]]}}], [("f", {"xs": [1.0, 2]})], "right"),
        ([{"f": {"xs": [[1, 2], ["A b"]]}}], [("f", {"xs": ["ab"]})], "right"),
        ([{"f": {"xs": [[1, 2]]}}], [("f", {"xs": [2, 1]})], "wrong"),
        ([{"f": {"xs": [[1, 2]]}}], [("f", {"xs": [1]})], "wrong"),
        ([{"f": {"xs": [[1, 2]]}}], [("f", {"xs": "1, 2"})], "wrong"),
        ([{"f": {"o": [{"a": [1, 2], "b": ["x", ""]}]}}], [("f", {"o": {"a": 2}})], "right"),
        ([{"f": {"o": [{"a": [1, 2], "b": ["x", ""]}]}}], [("f", {"o": {"a": 2, "b": "X"}})], "right"),
        ([{"f": {"o": [{"a": [1, 2]}]}}], [("f", {"o": {"a": 3}})], "wrong"),
        ([{"f": {"o": [{"a": [1, 2]}]}}], [("f", {"o": {}})], "wrong"),
        ([{"f": {"o": [{"a": [1, 2]}]}}], [("f", {"o": {"a": 1, "z": 1}})], "wrong"),
        ([{"f": {"o": [[{"a": [1]}]]}}], [("f", {"o": [{"a": 1}]})], "right"),
        ([{"f": {}}, {"g": {}}], [("g", {}), ("f", {})], "right"),
        ([{"f": {}}, {"g": {}}], [("f", {}), ("f", {})], "wrong"),
        ([{"math.factorial": {"n": [5]}}], [("math.factorial", {"n": 5})], "right"),
        ([{"math.factorial": {"n": [5]}}], [("math_factorial", {"n": 5})], "wrong"),
    ],
)
def test_signals_tool_call_compares_functions_and_arguments(
    reference: Any, made: list[tuple[str, Any]], reason: str
) -> None:
    verifier = ToolCall()
    verifier.check_reference(reference)
    assert reason_of(verifier.judge(task("tool_call", reference), calls(*made)).detail) == reason


def test_signals_tool_call_reads_the_first_message_only() -> None:
    right = calls(("f", {"x": 42}))
    verdict = ToolCall().judge(task("tool_call", REFERENCES["tool_call"]), [*says("hm"), *right])
    assert reason_of(verdict.detail) == "no_tool_call"
    assert ToolCall().judge(task("tool_call", REFERENCES["tool_call"]), [*right, *says("")]).outcome is Outcome.PASS


@pytest.mark.parametrize(
    "reference", [None, {}, [], [{}], [{"f": {"x": []}}], [{"f": {"x": 1}}], [{"f": {}, "g": {}}], "f"]
)
def test_signals_tool_call_refuses_other_references(reference: Any) -> None:
    with pytest.raises(ValueError, match="accepted value"):
        ToolCall().check_reference(reference)


# --- reasoning_gym ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "text", "reason"),
    [
        ("chain_sum", "42", "right"),
        ("chain_sum", "42.0", "right"),
        ("chain_sum", "thinking <answer>42</answer>", "right"),
        ("chain_sum", "It is 42", "wrong"),
        ("basic_arithmetic", "42", "right"),
        ("basic_arithmetic", "43", "wrong"),
    ],
)
def test_signals_reasoning_gym_scores_with_the_dataset_scorer(dataset: str, text: str, reason: str) -> None:
    reference = {"dataset": dataset, "entry": {"answer": "42"}}
    judgement = ReasoningGym().judge(task("reasoning_gym", reference), says(text))
    assert reason_of(judgement.detail) == reason


def test_signals_reasoning_gym_below_the_threshold_fails_with_its_score() -> None:
    judgement = ReasoningGym().judge(task("reasoning_gym", REFERENCES["reasoning_gym"]), says("It is 42"))
    assert judgement.outcome is Outcome.FAIL
    assert 0 < judgement.score < 0.99


def test_signals_reasoning_gym_counts_a_scorer_that_raises_as_a_failed_answer() -> None:
    # This scorer takes the parts of the answer for integers.
    reference = {"dataset": "prime_factorization", "entry": {"answer": "2 x 2"}}
    judgement = ReasoningGym().judge(task("reasoning_gym", reference), says("1 + 1"))
    assert judgement.outcome is Outcome.FAIL
    assert reason_of(judgement.detail) == "verifier_error"


@pytest.mark.parametrize(
    "reference",
    [None, "42", {"dataset": "chain_sum"}, {"dataset": "chain_sum", "entry": {}},
     {"dataset": 1, "entry": {"answer": "1"}}, {"dataset": "no_such_set", "entry": {"answer": "1"}}],
)  # fmt: skip
def test_signals_reasoning_gym_refuses_other_references(reference: Any) -> None:
    with pytest.raises(ValueError, match="name of a reasoning-gym dataset"):
        ReasoningGym().check_reference(reference)

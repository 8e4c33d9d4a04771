"""Answers that are held to a JSON Schema: they match it, whatever the weights would rather say."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_fixtures import answer, byte_tokenizer, call, running, write_tiny_model
from tidegate.core.errors import RequestError
from tidegate.core.hashing import ordered_json
from tidegate.core.types import FinishReason, TokenDelta
from tidegate.engines.embedded.constraints import Constraint, Grammars
from tidegate.engines.embedded.engine import EmbeddedEngine
from tidegate.engines.embedded.forms import schema_form

POINT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 999},
        "side": {"enum": ["left", "right"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["x", "side", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def engine(model_dir: Path) -> AsyncGenerator[EmbeddedEngine]:
    async with running(model_dir) as ready:
        yield ready


def held(schema: Any, **options: Any) -> Any:
    return call("go", **{"max_tokens": 200, "json_schema": ordered_json(schema), **options})


def matches_point(value: Any) -> bool:
    return (
        set(value) == {"x", "side", "tags"}
        and type(value["x"]) is int
        and 0 <= value["x"] <= 999
        and value["side"] in ("left", "right")
        and len(value["tags"]) <= 3
        and all(type(tag) is bool for tag in value["tags"])
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
async def test_every_answer_matches_its_schema_and_ends_by_itself(engine: EmbeddedEngine, temperature: float) -> None:
    for seed in range(5):
        _, choices = await answer(engine, held(POINT, temperature=temperature, seed=seed, n=3))
        for choice in choices:
            assert choice.finish_reason is FinishReason.STOP
            assert matches_point(json.loads(choice.text)), choice.text
    _, (free,) = await answer(engine, call("go", max_tokens=50))
    with pytest.raises(ValueError, match="Expecting"):
        json.loads(free.text)


async def test_other_rows_of_the_batch_are_not_held(engine: EmbeddedEngine) -> None:
    request = call("go", max_tokens=30)
    _, (alone,) = await answer(engine, request)
    mixed = await _together(engine, request, held(POINT), held({"enum": [7]}))
    assert mixed[0].token_ids == alone.token_ids
    assert matches_point(json.loads(mixed[1].text))
    assert mixed[2].text == "7"


async def _together(engine: EmbeddedEngine, *requests: Any) -> list[Any]:
    import asyncio

    found = await asyncio.gather(*(answer(engine, request) for request in requests))
    return [choices[0] for _, choices in found]


async def test_log_probabilities_are_those_of_what_was_allowed(engine: EmbeddedEngine) -> None:
    request = held({"enum": [7]}, temperature=1.0, seed=1, top_logprobs=5)
    deltas = [event async for event in engine.generate(request) if isinstance(event, TokenDelta)]
    assert [logprob for delta in deltas for logprob in delta.logprobs] == [0.0, 0.0]  # one token was possible each time
    tops = [top for delta in deltas for top in delta.top_logprobs]
    assert [len(top) for top in tops] == [1, 1]
    _, choices = await answer(engine, held({"enum": [1, 2]}, temperature=1.0, seed=1, n=20))
    chances = {choice.text: math.exp(choice.logprobs[0]) for choice in choices}
    assert set(chances) == {"1", "2"}
    assert sum(chances.values()) == pytest.approx(1.0, abs=1e-5)


async def test_a_limit_ends_an_answer_in_the_middle(engine: EmbeddedEngine) -> None:
    _, (choice,) = await answer(engine, held(POINT, max_tokens=3))
    assert choice.finish_reason is FinishReason.LENGTH
    assert choice.text == '{"x'


async def test_the_same_seed_says_the_same(engine: EmbeddedEngine) -> None:
    one, other, third = [
        (await answer(engine, held(POINT, temperature=2.0, seed=seed)))[1][0].text for seed in (5, 5, 6)
    ]
    assert one == other != third


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "wrong"}, "Invalid type: wrong"),
        ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"$ref": "https://example.com/schema"}, "not present in a registry"),
        ({"type": "string", "pattern": "(?=x)"}, "regex parse error"),
        ({"type": "integer", "multipleOf": 999983}, "multipleOf is 999983; at most 1000"),
        ({"properties": {f"p{n}": {} for n in range(257)}}, "257 properties; at most 256"),
        ({"$ref": "#"}, "held to"),
        ({"const": "<|im_end|>x"}, "a token of the model's own"),
    ],
)
async def test_a_schema_that_cannot_be_held_to_is_refused(
    engine: EmbeddedEngine, schema: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        await answer(engine, held(schema))
    assert refused.value.param == "response_format"
    _, (choice,) = await answer(engine, held({"enum": [7]}))  # and nobody else suffers
    assert choice.text == "7"


async def test_a_constraint_that_breaks_ends_only_its_own_call(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(self: Constraint) -> torch.Tensor:
        self._fault = "too complex"
        return torch.zeros(self._vocabulary_size, dtype=torch.bool)

    monkeypatch.setattr(Constraint, "allowed", nothing)
    with pytest.raises(RequestError, match=r"can't be held to its JSON schema any further \(too complex\)"):
        await answer(engine, held(POINT))
    _, (choice,) = await answer(engine, call("go", max_tokens=5))
    assert len(choice.token_ids) == 5


# --- the constraint by itself -------------------------------------------------------------------------------

TOKENIZER = byte_tokenizer()
GRAMMARS = Grammars(TOKENIZER, vocabulary_size=len(TOKENIZER) + 9, end_ids=frozenset({2}))


def allows(constraint: Constraint) -> set[int]:
    mask = constraint.allowed()
    assert mask.shape == (len(TOKENIZER) + 9,)
    return set(mask.nonzero()[:, 0].tolist())


def constraint_of(schema: Any) -> Constraint:
    (made,) = asyncio.run(GRAMMARS.constraints(schema_form(ordered_json(schema)), 1))
    return made


def test_the_end_is_allowed_only_when_the_answer_is_whole() -> None:
    constraint = constraint_of({"type": "integer", "minimum": 1, "maximum": 12})
    digits = {TOKENIZER.convert_tokens_to_ids(digit) for digit in "123456789"}
    assert allows(constraint) == digits
    constraint.accept(TOKENIZER.convert_tokens_to_ids("1"))
    assert allows(constraint) == {2, *(TOKENIZER.convert_tokens_to_ids(digit) for digit in "012")}
    constraint.accept(TOKENIZER.convert_tokens_to_ids("2"))
    assert allows(constraint) == {2}
    constraint.accept(2)
    assert not constraint.fault


def test_constraints_of_one_schema_do_not_share_their_place() -> None:
    one, other = asyncio.run(GRAMMARS.constraints(schema_form(ordered_json({"enum": ["ab"]})), 2))
    before = allows(other)
    one.accept(TOKENIZER.convert_tokens_to_ids('"'))
    assert allows(one) != before
    assert allows(other) == before == allows(constraint_of({"enum": ["ab"]}))


def test_a_token_that_was_not_allowed_is_a_fault() -> None:
    constraint = constraint_of({"enum": [1]})
    constraint.accept(TOKENIZER.convert_tokens_to_ids("2"))
    assert constraint.fault
    assert allows(constraint) == set()


SCALARS = st.one_of(st.integers(-99, 99), st.booleans(), st.none(), st.text('aé"\\ 😀', max_size=4))


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(SCALARS, min_size=1, max_size=4, unique_by=repr), st.randoms(use_true_random=False))
def test_any_walk_through_what_is_allowed_is_one_of_the_values(values: list[Any], chance: Any) -> None:
    constraint = constraint_of({"enum": values})
    said: list[int] = []
    while (token := chance.choice(sorted(allows(constraint)))) != 2:
        constraint.accept(token)
        said.append(token)
        assert len(said) < 200
    found = json.loads(TOKENIZER.decode(said))
    assert any(type(found) is type(value) and found == value for value in values)

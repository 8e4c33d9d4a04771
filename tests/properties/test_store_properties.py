"""Whatever is stored comes back exactly, and any change of the log is found."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store_samples import interaction
from tidegate.core.audit import next_record, verify_chain
from tidegate.core.errors import AuditError
from tidegate.core.types import AuditRecord, Choice, FinishReason, Sampling, Task
from tidegate.stores import codec
from tidegate.stores.packing import pack_logprobs, pack_token_ids, unpack_logprobs, unpack_token_ids

any_text = st.text(alphabet=st.characters(codec=None))  # lone surrogates too: JSON can carry them
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=8,
)
messages = st.lists(st.dictionaries(any_text, json_values, max_size=4), max_size=3).map(tuple)
token_ids = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=300).map(tuple)
float32 = st.floats(width=32, allow_nan=False)


@st.composite
def choices(draw: st.DrawFn) -> Choice:
    ids = draw(token_ids)
    logprobs = draw(st.just(()) | st.lists(float32, min_size=len(ids), max_size=len(ids)).map(tuple))
    return Choice(
        index=draw(st.integers(0, 8)),
        token_ids=ids,
        logprobs=logprobs,
        text=draw(any_text),
        tool_calls=draw(messages),
        finish_reason=draw(st.sampled_from(FinishReason)),
        invalid_tool_call=draw(st.booleans()),
    )


tasks = st.builds(
    Task, id=st.text(), messages=messages, tools=messages, verifier=st.text(), reference=json_values, kind=st.text()
)
samplings = st.builds(Sampling, temperature=st.floats(0, 2), seed=st.none() | st.integers(), stop=st.tuples(any_text))


@given(
    messages=messages,
    tools=messages,
    sampling=samplings,
    prompt_token_ids=token_ids,
    choices=st.lists(choices(), max_size=3).map(tuple),
    task=st.none() | tasks,
)
def test_every_interaction_survives_the_codec(**fields: Any):
    record = interaction(**fields)
    row = {**codec.episode_row(record), **codec.interaction_row(record)}
    assert codec.interaction_of(row) == record
    assert [list(message) for message in codec.interaction_of(row).messages] == [list(m) for m in fields["messages"]]


@given(token_ids)
def test_token_ids_survive_packing(ids: tuple[int, ...]):
    assert unpack_token_ids(pack_token_ids(ids)) == ids


@given(st.lists(st.floats(width=32)))
def test_log_probabilities_survive_packing_bit_for_bit(values: list[float]):
    found = unpack_logprobs(pack_logprobs(values))
    assert [struct.pack("<f", v) for v in found] == [struct.pack("<f", v) for v in values]


@given(bodies=st.lists(st.dictionaries(st.text(), st.integers() | st.text()), min_size=2, max_size=6), data=st.data())
def test_any_changed_record_breaks_the_chain(bodies: list[dict[str, object]], data: st.DataObject):
    records: list[AuditRecord] = []
    for n, body in enumerate(bodies):
        records.append(next_record(records[-1] if records else None, kind="note", body=body, time=float(n)))
    assert verify_chain(records) == len(records)
    at = data.draw(st.integers(0, len(records) - 1))
    records[at] = replace(records[at], body={**records[at].body, "forged": True})
    with pytest.raises(AuditError, match=f"record {at + 1} "):
        verify_chain(records)

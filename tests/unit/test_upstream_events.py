"""Server-sent events: in any pieces the same, bounded, and whole or refused."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.errors import EngineError
from tidegate.engines.remote.events import MAX_EVENT_BYTES, EventReader

EVENTS = [{"a": 1}, {"text": "ü\n\u2028"}, {}]


def stream(newline: str = "\n") -> bytes:
    lines = [": a comment", "event: message"]
    for event in EVENTS:
        lines += [f"data: {json.dumps(event, ensure_ascii=False)}", ""]
    return newline.join([*lines, "data: [DONE]", "", "data: {after}", "", ""]).encode()


@given(st.sets(st.integers(0, len(stream("\r\n"))), max_size=12), st.sampled_from(["\n", "\r\n"]))
def test_the_pieces_do_not_matter(cuts: set[int], newline: str) -> None:
    data = stream(newline)
    places = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    reader = EventReader()
    found = [event for start, end in itertools.pairwise(places) for event in reader.feed(data[start:end])]
    assert found == EVENTS
    assert reader.done
    reader.finish()


@pytest.mark.parametrize("data", ["{broken", "[1]", "7", "null", "", "{" * 100_000])
def test_what_is_no_object_is_shown_in_short(data: str) -> None:
    with pytest.raises(EngineError, match="JSON objects are expected") as caught:
        list(EventReader().feed(f"data: {data}\n\n".encode()))
    assert len(str(caught.value)) < 200


def test_data_in_several_lines_is_one_event() -> None:
    assert list(EventReader().feed(b'data: {"a":\ndata: 1}\n\n')) == [{"a": 1}]


@pytest.mark.parametrize("line", [b"data: ", b""])
def test_an_event_without_an_end_does_not_fill_the_memory(line: bytes) -> None:
    reader = EventReader()
    list(reader.feed(line + b"x" * (MAX_EVENT_BYTES - len(line))))
    with pytest.raises(EngineError, match="more than"):
        list(reader.feed(b"x"))


def test_lines_that_pile_up_do_not_fill_the_memory_either() -> None:
    reader = EventReader()
    line = b"data: " + b"x" * (MAX_EVENT_BYTES // 8) + b"\n"
    for _ in range(7):
        list(reader.feed(line))
    with pytest.raises(EngineError, match="more than"):
        list(reader.feed(line))


@pytest.mark.parametrize("end", ["data: [DONE]", "data:[DONE]\n", "data: [DONE] \n\n", "data:  [DONE]\t\r\n\r\n"])
def test_the_end_is_known_without_an_empty_line_and_with_blanks(end: str) -> None:
    reader = EventReader()
    assert list(reader.feed(f'data: {{"a": 1}}\n\n{end}'.encode())) == [{"a": 1}]
    reader.finish()


def test_an_event_that_the_end_cuts_off_is_not_lost_in_silence() -> None:
    reader = EventReader()
    assert list(reader.feed(b'data: {"a": 1}\ndata: [DONE]')) == []
    with pytest.raises(EngineError, match="no whole answer"):
        reader.finish()


def test_the_end_does_not_wait_for_more() -> None:
    reader = EventReader()
    assert list(reader.feed(b'data: {"a": 1}\ndata: [DONE]\n')) == [{"a": 1}]
    assert reader.done


@pytest.mark.parametrize("data", ["data: {}", "data:", "data: now", 'data: {"type": "ping"}', "data: [1]", ": none"])
def test_events_of_other_names_are_no_part_of_an_answer(data: str) -> None:
    reader = EventReader()
    assert list(reader.feed(f'event: ping\n{data}\n\ndata: {{"a": 1}}\n\n'.encode())) == [{"a": 1}]


@pytest.mark.parametrize("name", ["chat.completion.chunk", "error", "message", ""])
def test_parts_of_an_answer_count_under_any_name(name: str) -> None:
    for value in ({"choices": []}, {"error": "out of memory"}):
        assert list(EventReader().feed(f"event: {name}\ndata: {json.dumps(value)}\n\n".encode())) == [value]


@pytest.mark.parametrize("name", ["error", "message"])
def test_a_broken_part_of_an_answer_is_refused(name: str) -> None:
    with pytest.raises(EngineError, match="JSON objects are expected"):
        list(EventReader().feed(f"event: {name}\ndata: boom\n\n".encode()))


def test_an_end_before_the_end_is_told() -> None:
    reader = EventReader()
    assert list(reader.feed(b'data: {"a": 1}\n\ndata: {"cut')) == [{"a": 1}]
    with pytest.raises(EngineError, match=r"without '\[DONE\]'"):
        reader.finish()

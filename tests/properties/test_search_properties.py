"""Search: the best is the maximum, the vote is the mode, and a beam that never cuts is exhaustive search."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.search import beam_search, best_of_n, majority_vote

SCORES = st.lists(st.floats(allow_nan=False), min_size=1, max_size=20)
LETTERS = "abc"
TABLES = st.lists(st.integers(-5, 5), min_size=40, max_size=40)  # one score for each word of up to three letters


def words(word: str) -> list[tuple[str, str]]:
    """Every step from a word; one that ends in "c" is final."""
    return [] if word.endswith("c") else [(letter, word + letter) for letter in LETTERS]


def all_words(depth: int) -> list[str]:
    """What a search without any cut comes to."""
    tuples = ("".join(letters) for letters in itertools.product(LETTERS, repeat=depth))
    return list(dict.fromkeys(word.partition("c")[0] + ("c" if "c" in word else "") for word in tuples))


@given(SCORES)
def test_the_best_of_n_is_the_first_that_scores_the_maximum(scores: list[float]) -> None:
    best = best_of_n(range(len(scores)), scores.__getitem__)
    assert scores[best] == max(scores)
    assert all(score < scores[best] for score in scores[:best])


def test_every_candidate_is_scored_once() -> None:
    asked: list[str] = []
    best_of_n("abcab", lambda letter: asked.append(letter) or 0.0)
    assert asked == list("abcab")


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20))
def test_the_vote_is_the_most_frequent_answer_and_the_first_seen_of_equals(answers: list[int]) -> None:
    winner = majority_vote(answers)
    counts = Counter(answers)
    assert counts[winner] == max(counts.values())
    leading = [answer for answer in answers if counts[answer] == counts[winner]]
    assert winner == leading[0]


@given(TABLES, st.integers(0, 3))
def test_a_beam_that_never_cuts_is_exhaustive_search(table: list[int], depth: int) -> None:
    places = {word: place for place, word in enumerate(dict.fromkeys(w for d in range(4) for w in all_words(d)))}

    def score(word: str) -> float:
        return float(table[places[word]])

    beams = beam_search("", words, score, width=10**6, depth=depth)
    assert sorted(beam.state for beam in beams) == sorted(all_words(depth))
    assert [beam.score for beam in beams] == sorted(map(score, all_words(depth)), reverse=True)
    assert all(beam.score == score(beam.state) for beam in beams)


@given(TABLES, st.integers(1, 6), st.integers(0, 3))
def test_paths_follow_their_actions_and_the_width_bounds_them(table: list[int], width: int, depth: int) -> None:
    beams = beam_search(
        "", words, lambda word: float(table[len(word) * 7 + sum(map(ord, word)) % 7]), width=width, depth=depth
    )
    assert 1 <= len(beams) <= width
    assert [beam.score for beam in beams] == sorted((beam.score for beam in beams), reverse=True)
    for beam in beams:
        assert list(beam.states) == list(itertools.accumulate(beam.actions, initial=""))
        assert len(beam.actions) <= depth


def test_equal_scores_stay_in_the_order_in_which_they_were_found() -> None:
    beams = beam_search("", words, lambda _: 0.0, width=5, depth=2)
    assert [beam.state for beam in beams] == ["aa", "ab", "ac", "ba", "bb"]


def test_a_finished_path_competes_with_those_that_go_on() -> None:
    beams = beam_search("", words, lambda word: 5.0 if word == "c" else float(len(word)), width=2, depth=3)
    assert [beam.state for beam in beams] == ["c", "aaa"]


def test_a_narrow_beam_may_miss_what_a_wider_one_finds() -> None:
    values = {"": 0.0, "a": 1.0, "b": 2.0, "aa": 9.0, "ab": 0.0, "ba": 3.0, "bb": 3.0}

    def expand(word: str) -> list[tuple[str, str]]:
        return [(letter, word + letter) for letter in "ab"]

    found = [beam_search("", expand, values.__getitem__, width=width, depth=2)[0].state for width in (1, 2)]
    assert found == ["ba", "aa"]


def test_nothing_to_choose_from_and_scores_without_order_are_errors() -> None:
    with pytest.raises(ValueError, match="there are no candidates"):
        best_of_n([], lambda _: 0.0)
    with pytest.raises(ValueError, match="there are no answers"):
        majority_vote([])
    with pytest.raises(ValueError, match="the score of 'b' is NaN"):
        best_of_n("ab", lambda letter: math.nan if letter == "b" else 1.0)
    with pytest.raises(ValueError, match="the score of 'b' is NaN"):
        beam_search("", words, lambda word: math.nan if word == "b" else 1.0, width=1, depth=1)


@pytest.mark.parametrize(("width", "depth"), [(0, 1), (-1, 1), (1, -1)])
def test_a_beam_of_nothing_is_an_error(width: int, depth: int) -> None:
    with pytest.raises(ValueError, match=f"width = {width}, depth = {depth}"):
        beam_search("", words, lambda _: 0.0, width=width, depth=depth)

"""Near-duplicates: the index finds exactly what comparing all pairs finds."""

# ruff: noqa: RUF001 - Chinese and Japanese marks are meant

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.selection.near_duplicates import PromptIndex, shingles
from tidegate.core.types import Messages
from tidegate.signals.tasks.generate import TASK_KINDS, generate_tasks

words = st.lists(
    st.sampled_from(
        ["add", "the", "sum", "of", "three", "numbers", "1", "2", "3", "please", "now", "再算", "一共三个"]
    ),
    max_size=12,
)


APPLES = "小明有17个苹果，他给了小红5个，后来又买了23个，现在小明一共有多少个苹果？"


def said(text: str) -> Messages:
    return ({"role": "user", "content": text},)


@given(st.lists(words, max_size=8), words, st.sampled_from([0.3, 0.5, 0.8, 1.0]))
def test_the_index_agrees_with_comparing_all_pairs(
    indexed: list[list[str]], asked: list[str], threshold: float
) -> None:
    prompts = [said(" ".join(text)) for text in indexed]
    prompt = said(" ".join(asked))
    mine = shingles(prompt)
    expected = any(len(mine & shingles(other)) / len(mine | shingles(other)) >= threshold for other in prompts)
    assert PromptIndex(prompts, threshold=threshold).has_near(prompt) is expected


@given(words)
def test_case_spaces_and_order_of_indexing_do_not_matter(asked: list[str]) -> None:
    text = " ".join(asked)
    index = PromptIndex([said("something else altogether here"), said(f"  {text.upper()} \n")])
    assert index.has_near(said(text))


@pytest.mark.parametrize(
    ("one", "other", "near"),
    [
        ("What is 12 + 30?", "What is 12 + 31?", False),
        ("What is 12 + 30?", "what is 12 + 30 ?", True),
        ("hi", "Hi", True),
        ("hi", "ho", False),
        ("Hi!", "hello!", False),
        ("Compute 17 * 23 please", "Hi. Compute 17 * 23 please", True),
        ("Compute 17 * 23 please", "Hello there!\nPlease compute 17 * 23 please", True),
        ("Compute 17 * 23 please", "Hi. Compute 17 * 24 please", False),
        ("Compute 17 * 23 please", "Hi. Compute 17 + 23 please", False),
        ("Translate hello into French", "Translate please into French", False),
        ("请计算十七乘以二十三等于多少", "请计算十七乘以二十三等于多少呢", True),
        ("请计算十七乘以二十三等于多少", "你好，请计算十七乘以二十三等于多少", True),
        ("请计算十七乘以二十三等于多少", "请计算十七乘以二十四等于多少", False),
        ("计算 17 * 23", "你好！计算 17 * 23", True),
        ("计算 17 * 23", "你好！计算 17 * 24", False),
        (APPLES, APPLES.replace("一共", "一共还"), False),
        (APPLES, APPLES.replace("17", "18"), False),
        (
            "りんごが12個あります。30個もらうと全部で何個になりますか",
            "りんごが12個あります。30個もらうと全部で何個になりますか？",
            True,
        ),
        (
            "りんごが12個あります。30個もらうと全部で何個になりますか",
            "りんごが12個あります。31個もらうと全部で何個になりますか",
            False,
        ),
        ("ประเทศไทยมีกี่จังหวัดในปัจจุบัน", "ประเทศไทยมีกี่จังหวัดในปัจจุบันครับ", False),
        (
            "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many?",
            "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many!",
            True,
        ),
        (
            "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many?",
            "Natalia sold pens to 12 of her friends in June, and then she sold twice as many pens in July. How many?",
            False,
        ),
    ],
)
def test_other_numbers_are_another_task_and_other_marks_are_not(one: str, other: str, near: bool) -> None:
    assert PromptIndex([said(one)]).has_near(said(other)) is near
    assert PromptIndex([said(other)]).has_near(said(one)) is near


def test_what_the_system_says_to_everybody_makes_no_two_prompts_alike() -> None:
    system = {"role": "system", "content": "You are a careful calculator. " * 50}
    assert not PromptIndex([(system, *said("What is 12 + 30?"))]).has_near((system, *said("Name a colour.")))


def test_nothing_is_near_to_nothing_and_a_threshold_has_a_range() -> None:
    assert not PromptIndex([]).has_near(said("hello"))
    for threshold in (0.0, 1.1):
        with pytest.raises(ValueError, match="a number in"):
            PromptIndex([], threshold=threshold)


@pytest.mark.parametrize("kind", TASK_KINDS)
def test_tasks_of_one_template_are_different_tasks(kind: str) -> None:
    tasks = generate_tasks(kind, 160, 1)
    index = PromptIndex(task.messages for task in tasks[:100])
    assert not any(index.has_near(task.messages) for task in tasks[100:])

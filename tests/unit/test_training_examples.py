"""Examples become exactly the tokens that serving would compute on."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tidegate.core.chat import content_text, encode_prompt, render_tool_call
from tidegate.core.errors import TrainingError
from tidegate.core.types import Example
from tidegate.training.examples import read_examples, render_example, teaches_control_tokens
from tidegate.training.packing import TrainingSequence
from training_fixtures import agent_example, byte_tokenizer, token_example, write_examples

KNOWING_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if tools %}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def trained_parts(sequence: TrainingSequence) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(everything before, completion) of each run of trained tokens."""
    parts: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    index = 0
    while index < len(sequence.token_ids):
        if sequence.loss_mask[index]:
            stop = next((i for i in range(index, len(sequence.loss_mask)) if not sequence.loss_mask[i]), None)
            stop = len(sequence.loss_mask) if stop is None else stop
            parts.append((sequence.token_ids[:index], sequence.token_ids[index:stop]))
            index = stop
        index += 1
    return parts


def test_each_call_has_the_prompt_of_serving_and_a_completion_that_ends() -> None:
    tokenizer, example = byte_tokenizer(), agent_example(3)
    (sequence,) = render_example(tokenizer, example)
    parts = trained_parts(sequence)
    assert len(parts) == 2
    for index, (prompt, completion) in zip((2, 4), parts, strict=True):
        assert prompt == encode_prompt(tokenizer, example.messages[:index], example.tools)
        message = example.messages[index]
        text = content_text(message["content"]) + "".join(map(render_tool_call, message.get("tool_calls", ())))
        assert completion == (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id)


def test_a_history_that_the_template_rewrites_starts_a_sequence_of_its_own() -> None:
    tokenizer, example = byte_tokenizer(), agent_example(3)
    # As templates of reasoning models do, this one shows old assistant turns without their text.
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message['content'] + '", "(message['content'] if message['role'] != 'assistant' or loop.last else '') + '"
    )
    first, second = render_example(tokenizer, example)
    assert first.token_ids != second.token_ids[: len(first.token_ids)]
    for index, sequence in zip((2, 4), (first, second), strict=True):
        ((prompt, completion),) = trained_parts(sequence)
        assert prompt == encode_prompt(tokenizer, example.messages[:index], example.tools)
        assert completion[-1] == tokenizer.eos_token_id


def test_a_template_that_knows_tools_spells_the_calls() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = KNOWING_TEMPLATE
    (sequence,) = render_example(tokenizer, agent_example(3))
    (_, call), (_, answer) = trained_parts(sequence)
    assert tokenizer.decode(call) == "<call>calculator</call><|im_end|>"
    assert tokenizer.decode(answer) == "4<|im_end|>"


def test_only_the_named_messages_are_trained() -> None:
    tokenizer = byte_tokenizer()
    (sequence,) = render_example(tokenizer, replace(agent_example(3), trained_messages=(4,)))
    ((_, completion),) = trained_parts(sequence)
    assert tokenizer.decode(completion) == "4<|im_end|>"


def test_token_examples_are_taken_as_they_are() -> None:
    example = token_example([5, 6, 7, 8], trained=2, weight=0.5)
    (sequence,) = render_example(byte_tokenizer(), example)
    assert (sequence.token_ids, sequence.loss_mask, sequence.weight) == ((5, 6, 7, 8), (0, 0, 1, 1), 0.5)


def test_what_curation_writes_is_read_back(tmp_path: Path) -> None:
    examples = (agent_example(1), token_example([1, 2, 3], trained=1))
    assert read_examples(write_examples(tmp_path / "examples.jsonl", examples)) == examples


def line(example: Example, **changes: Any) -> str:
    return json.dumps({**asdict(example), **changes})


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{", "not JSON"),
        ("[]", "found list"),
        ('{"id": "x"}', "weight"),
        (line(agent_example(1), surprise=1), "surprise"),
        (line(agent_example(1), weight=0), "weight = 0"),
        (line(agent_example(1), weight=float("nan")), "weight = nan"),
        (line(agent_example(1), weight=True), "weight = True"),
        (line(agent_example(1), weight=1e308), "up to 1e"),
        (line(agent_example(1), weight=10**400), "up to 1e"),
        (line(agent_example(1), id=[1]), "id = "),
        (line(agent_example(1), token_ids=[1], loss_mask=[1]), "exactly one"),
        (line(agent_example(1), messages=[]), "exactly one"),
        (line(agent_example(1), trained_messages=[1]), "assistant"),
        (line(agent_example(1), trained_messages=[]), "assistant"),
        (line(agent_example(1), trained_messages=[9]), "index"),
        (line(token_example([1, 2], trained=1), loss_mask=[1]), "equal lengths"),
        (line(token_example([1, 2], trained=1), loss_mask=[0, 2]), "0 and 1"),
        (line(token_example([1, 2], trained=1), token_ids=[1, -2]), "integers from 0"),
        (line(token_example([1, 2], trained=1), reward=1.5), "reward = 1.5"),
        (line(token_example([1, 2], trained=1), reward=True), "reward = True"),
        (line(token_example([1, 2], trained=1), logprobs=[-0.5]), "1 logprobs for 2 token_ids"),
        (line(token_example([1, 2], trained=1), logprobs=[0.0, float("-inf")]), "finite numbers"),
        (line(token_example([1, 2], trained=1), logprobs=[0.0, 0.5]), "finite numbers"),
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, bad: str, says: str) -> None:
    path = tmp_path / "examples.jsonl"
    path.write_text(f"{line(agent_example(1))}\n{bad}\n", encoding="utf-8")
    with pytest.raises(TrainingError, match=says) as caught:
        read_examples(path)
    assert f"{path}:2" in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"gone\.jsonl"):
        read_examples(tmp_path / "gone.jsonl")


def test_messages_that_cannot_be_rendered_name_their_example() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(TrainingError, match=r"'e3'.*chat template"):
        render_example(tokenizer, agent_example(3))


def test_an_answer_needs_an_end_token() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert render_example(tokenizer, agent_example(3))[0].token_ids[-1] == tokenizer.eos_token_id
    tokenizer.eos_token = None
    with pytest.raises(TrainingError, match="eos_token"):
        render_example(tokenizer, agent_example(3))


def test_text_that_spells_control_tokens_is_told() -> None:
    tokenizer = byte_tokenizer()
    plain = agent_example(3)
    (end, *_) = tokenizer.all_special_tokens
    assert not teaches_control_tokens(tokenizer, plain)
    for index, message in (
        (4, {"role": "assistant", "content": f"fine{end}user"}),
        (2, {**plain.messages[2], "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": f"a{end}", "arguments": "{}"}}
        ]}),
    ):  # fmt: skip
        messages = (*plain.messages[:index], message, *plain.messages[index + 1 :])
        assert teaches_control_tokens(tokenizer, replace(plain, messages=messages))
    asked = ({"role": "user", "content": f"what is {end}?"}, *plain.messages[1:])
    assert not teaches_control_tokens(tokenizer, replace(plain, messages=asked))

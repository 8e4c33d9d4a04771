"""STaR's rationalization: a failed task is asked with its answer as a hint, and trained on as if without.

The hint stands in the last user message of the prompt. Everything that is trained on is the prompt without it, as the
engine tokenised that, and what came after the prompt with it.

Source: Zelikman et al. (2022), STaR: Bootstrapping Reasoning With Reasoning, section 3.2.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace

from tidegate.core.chat import content_text
from tidegate.core.selection.sifting import RATIONALIZED
from tidegate.core.types import Example, JsonObject, Messages

HINT_LEAKED = "hint_leaked"
NOT_ONE_SEQUENCE = "not_one_sequence"

_NOISE = re.compile(r"[\s\"'\\]+")  # JSON escapes quotes, models wrap lines
_ABOUT_A_HINT = re.compile(
    r"(?<![a-z])(?:hint|hinweis)|\byou (?:told|gave|said)\b|\byour message\b|\bas (?:stated|given|told)\b",
    re.IGNORECASE,
)


def with_hint(messages: Messages, hint: str) -> Messages | None:
    """``messages`` with the hint at the end of the last user message, None where no user speaks."""
    position = max((index for index, message in enumerate(messages) if message.get("role") == "user"), default=None)
    if position is None:
        return None
    content = messages[position].get("content") or ""
    longer = f"{content}\n{hint}" if isinstance(content, str) else [*content, {"type": "text", "text": f"\n{hint}"}]
    return (*messages[:position], {**messages[position], "content": longer}, *messages[position + 1 :])


def mentions_hint(said: Messages, hint: str, question: Messages) -> bool:
    """Whether messages after the prompt repeat the hint or what it says, or speak of having been told.

    Words are looked for in compatibility form and without invisible characters. That finds what a model that was given
    the hint is likely to say, not everything that it could say. Where the question speaks of hints itself, the words
    alone say nothing, and only the hint's own sentence counts.
    """
    text = _visible("\n".join(map(_everything, said)))
    said_by_hint = _visible(hint).partition(":")[2] or hint
    if any(_plain(part) in _plain(text) for part in (_visible(hint), said_by_hint)):
        return True
    return bool(_ABOUT_A_HINT.search(text)) and not _ABOUT_A_HINT.search("\n".join(map(_everything, question)))


def without_hint(example: Example, *, hinted_prompt: Sequence[int], prompt: Sequence[int]) -> Example | str:
    """The example with another prompt before what was sampled.

    Args:
        example: in token form, as the calls of the hinted episode gave it.
        hinted_prompt: token ids of the first prompt, hint included.
        prompt: token ids of that prompt without the hint.

    Returns:
        The example without log-probabilities and group, which are those of the hinted prompt; or why there is none:
        ``NOT_ONE_SEQUENCE`` where the tokens do not go on from the first prompt, ``HINT_LEAKED`` where the hint's own
        tokens come again after it.
    """
    length = len(hinted_prompt)
    if example.token_ids[:length] != tuple(hinted_prompt):
        return NOT_ONE_SEQUENCE
    after = example.token_ids[length:]
    hint = _inserted(prompt, hinted_prompt)
    if hint and any(after[start : start + len(hint)] == hint for start in range(len(after) - len(hint) + 1)):
        return HINT_LEAKED
    return replace(
        example,
        source=RATIONALIZED,
        token_ids=(*prompt, *after),
        loss_mask=(*[0] * len(prompt), *example.loss_mask[length:]),
        logprobs=(),
        group=None,
    )


def _inserted(prompt: Sequence[int], hinted_prompt: Sequence[int]) -> tuple[int, ...]:
    """What stands in the second sequence between the longest beginning and end that it shares with the first."""
    shortest = min(len(prompt), len(hinted_prompt))
    start = next((index for index in range(shortest) if prompt[index] != hinted_prompt[index]), shortest)
    left = shortest - start
    end = next((index for index in range(left) if prompt[-1 - index] != hinted_prompt[-1 - index]), left)
    return tuple(hinted_prompt[start : len(hinted_prompt) - end])


def _everything(message: JsonObject) -> str:
    """Text of a message and of its tool calls."""
    calls = (call["function"] for call in message.get("tool_calls") or ())
    return "\n".join([content_text(message.get("content")), *(f"{call['name']} {call['arguments']}" for call in calls)])


def _visible(text: str) -> str:
    """Compatibility form without characters that only format."""
    return "".join(c for c in unicodedata.normalize("NFKC", text) if unicodedata.category(c) != "Cf")


def _plain(text: str) -> str:
    return _NOISE.sub("", text).casefold()

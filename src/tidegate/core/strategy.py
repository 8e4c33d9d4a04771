"""What counts as the same way of answering: the tools called, in order, and the form of the last text.

Two grains: :func:`normalised` keeps what was said, so that answers to one task can be told apart; a cluster also leaves
out which numbers were said, so that answers to many tasks of one template fall together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from tidegate.core.hashing import canonical_json, content_hash
from tidegate.core.searched import answer_of
from tidegate.core.types import Choice, Episode

_SPACES = re.compile(r"\s+")
_ENDS = " \t.,;:!?\"'`*()[]{}"
_LONGEST_NAME = 64  # characters that OpenAI's API allows in a function's name
_NUMBER = re.compile(r"(?:(?<![\w.)])[-+\u2212])?\d+(?:[.,/:]\d+)*")


def normalised(text: str) -> str:
    """The text without case, runs of white space, and punctuation at its ends."""
    return _SPACES.sub(" ", text).strip(_ENDS).casefold()


def strategy_cluster(tools: Sequence[str], text: str) -> str:
    """Name of a way of answering: the tools called, and 12 hex digits for the form of the text.

    Numbers count as one and the same, signs included. The text is hashed, because names of clusters stand in manifests;
    so is a tool's name that is too long for one, because a model may write anything in its place.

    Args:
        tools: names of the tools called, in order.
        text: the last text of the answer.
    """
    form = _NUMBER.sub("N", normalised(text))
    return f"{'>'.join(map(_shown, tools))}:{content_hash([list(tools), form])[:12]}"


def vote_of(choice: Choice) -> str | None:
    """What a choice votes for where the majority decides: the calls it makes and its normalised text.

    None where it abstains: it says and calls nothing, or opened a tool call that does not parse.
    """
    text = normalised(choice.text)
    if choice.invalid_tool_call or not (text or choice.tool_calls):
        return None
    calls = [[call["function"]["name"], _arguments(call["function"]["arguments"])] for call in choice.tool_calls]
    return canonical_json([calls, text])  # no hash: half a surrogate pair has no bytes


def _arguments(text: str) -> object:
    """The value of JSON text, so that the order of its keys does not count; other text as it is."""
    try:
        value = json.loads(text)
        canonical_json(value).encode()
    except (ValueError, RecursionError):
        return text
    return value


def tools_of(cluster: str) -> str:
    """The part of a cluster's name that tells the tools."""
    return cluster.rpartition(":")[0]


def episode_cluster(episode: Episode) -> str:
    """The cluster of the answers to an episode's calls."""
    choices = [answer_of(call) for call in episode.interactions if call.choices]
    tools = [str(call["function"]["name"]) for choice in choices for call in choice.tool_calls]
    return strategy_cluster(tools, choices[-1].text if choices else "")


def _shown(tool: str) -> str:
    return tool if len(tool) <= _LONGEST_NAME else f"#{content_hash(tool)[:12]}"

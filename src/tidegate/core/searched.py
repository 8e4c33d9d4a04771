"""Records of calls that were answered by a search: several choices sampled, one picked, one delivered.

What was picked is not a draw from the model: it is better than the model's usual answer, and its log-probabilities say
nothing of that. The choices of a call together are draws, one group of answers to one prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tidegate.core.types import Choice, Episode, FinishReason, Interaction


def answer_of(call: Interaction) -> Choice:
    """The choice that the episode went on from: the first one that the client got.

    Where a search ended before it picked one that is the first of all, which are ``cancelled`` then.

    Args:
        call: with at least one choice.
    """
    return next((choice for choice in call.choices if choice.delivered), call.choices[0])


def is_searched(episode: Episode) -> bool:
    """Whether some answer of the main line was picked among several."""
    return any(call.main_line and call.sampling.search is not None for call in episode.interactions)


def searched_groups(episodes: Sequence[Episode]) -> list[Episode]:
    """The choices of searched calls as episodes of one call each, for objectives that compare the answers of a group.

    Each is what an unsearched call would have recorded. Only an episode whose main line is one call, answered to its
    end, on a declared task is taken apart: what an agent did after a choice that nobody went on from is not known. Ids
    are that of the episode, a space, and the choice's index, so that they lead back to it.

    Args:
        episodes: of any kind; those without a search give nothing.
    """
    return [
        _alone(episode, call, choice)
        for episode in episodes
        if is_searched(episode)
        for call in _only_call(episode)
        if call.task is not None and not any(choice.finish_reason is FinishReason.CANCELLED for choice in call.choices)
        for choice in call.choices
    ]


def _only_call(episode: Episode) -> Sequence[Interaction]:
    calls = [call for call in episode.interactions if call.main_line]
    return calls if len(calls) == 1 else ()


def _alone(episode: Episode, call: Interaction, choice: Choice) -> Episode:
    name = f"{episode.id} {choice.index}"
    single = replace(
        call,
        id=f"{call.id} {choice.index}",
        episode_id=name,
        sampling=replace(call.sampling, n=1, search=None),
        choices=(replace(choice, delivered=True),),
    )
    return replace(episode, id=name, interactions=(single,))

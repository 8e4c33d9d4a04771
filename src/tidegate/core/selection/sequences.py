"""From the calls of an episode to token sequences, with the engine's own tokens and nothing re-tokenised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.core.selection.episodes import dropped_episode, episode_kind
from tidegate.core.selection.sifting import EPISODE, Dropped, Sifted
from tidegate.core.types import Episode, Example, Interaction


@dataclass(frozen=True, slots=True, kw_only=True)
class Fresh:
    """An example from traffic and the user it came from."""

    example: Example
    user_key: str


def token_sequences(episodes: Sequence[Episode]) -> Sifted[Fresh]:
    """One example per episode when its calls are one sequence, else one per call.

    The calls of an episode are one sequence when each prompt begins with the exact tokens of the previous
    prompt and completion. Trained are the sampled tokens, the end-of-turn token included: ``loss_mask`` is 1 there and
    0 on prompts and tool results. An episode of which any call lacks token ids, or a log-probability for each
    token, is dropped as ``no_token_ids``.
    """
    kept: list[Fresh] = []
    dropped: list[Dropped] = []
    for episode in episodes:
        if all(map(has_tokens, episode.interactions)) and episode.interactions:
            kept.extend(Fresh(example=example, user_key=episode.user_key) for example in _examples(episode))
        else:
            dropped.append(dropped_episode(episode, "no_token_ids"))
    return Sifted(kept=tuple(kept), dropped=tuple(dropped))


def has_tokens(call: Interaction) -> bool:
    """Whether the engine's tokens of the call's first choice were recorded in full."""
    if not call.prompt_token_ids or not call.choices:
        return False
    choice = call.choices[0]
    return len(choice.token_ids) > 0 and len(choice.logprobs) == len(choice.token_ids)


def _examples(episode: Episode) -> list[Example]:
    sequences = [_sequence([call]) for call in episode.interactions]
    if all(map(_goes_on, episode.interactions, episode.interactions[1:])):
        sequences = [_sequence(episode.interactions)]
    return [
        Example(
            id=episode.id if len(sequences) == 1 else f"{episode.id}/{index}",
            weight=1.0,
            source=EPISODE,
            kind=episode_kind(episode),
            token_ids=token_ids,
            loss_mask=loss_mask,
        )
        for index, (token_ids, loss_mask) in enumerate(sequences)
    ]


def _goes_on(call: Interaction, following: Interaction) -> bool:
    tokens = call.prompt_token_ids + call.choices[0].token_ids
    return following.prompt_token_ids[: len(tokens)] == tokens


def _sequence(calls: Sequence[Interaction]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids (T,) and loss mask (T,) of calls that continue one another."""
    token_ids: list[int] = []
    loss_mask: list[int] = []
    for call in calls:
        context = call.prompt_token_ids[len(token_ids) :]
        completion = call.choices[0].token_ids
        token_ids += [*context, *completion]
        loss_mask += [0] * len(context) + [1] * len(completion)
    return tuple(token_ids), tuple(loss_mask)

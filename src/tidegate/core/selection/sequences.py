"""From the calls of an episode to token sequences, with the engine's own tokens and nothing re-tokenised."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tidegate.core.hashing import content_hash
from tidegate.core.searched import answer_of
from tidegate.core.selection.episodes import dropped_episode, episode_kind
from tidegate.core.selection.sifting import EPISODE, Dropped, Sifted
from tidegate.core.strategy import episode_cluster
from tidegate.core.types import Choice, Episode, Example, FinishReason, Interaction, Messages

_ROUNDING = 1e-4  # engines state some log-probabilities a little above 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fresh:
    """An example, the user it came from, and where it was sampled the texts behind its tokens.

    ``prompt`` is the conversation before the last call, ``answer`` all that the model said and called.
    """

    example: Example
    user_key: str
    prompt: Messages = ()
    answer: str = ""


def origin_of(example_id: str) -> str:
    """Id of the episode, or of the feedback, that an example came from."""
    return example_id.partition(" ")[0]


def token_sequences(
    episodes: Sequence[Episode],
    *,
    rewards: Mapping[str, float] | None = None,
    cluster_of: Callable[[Episode], str] = episode_cluster,
) -> Sifted[Fresh]:
    """One example per episode when its calls are one sequence, else one per call.

    The calls of an episode are one sequence when each prompt begins with the exact tokens of the previous
    prompt and completion. Trained are the sampled tokens, the end-of-turn token included: ``loss_mask`` is 1 there and
    0 on prompts and tool results. An episode of which any call was cut short, by its client or by an engine
    that failed, is dropped as ``cancelled``: the model did not end there. One of which any call lacks token ids, or a
    log-probability for each token, is dropped as ``no_token_ids``.

    Recorded log-probabilities are carried along unless they are of another distribution than was sampled from: greedy
    calls, top-p, top-k, penalties and answers picked among several leave an example without any, as do values that are
    no log-probabilities. The group is a hash of the prompt's tokens, so that equal prompts form one, whoever asked.

    Args:
        episodes: their main lines.
        rewards: score by episode id, in [0, 1].
        cluster_of: names the strategy of an episode.
    """
    kept: list[Fresh] = []
    dropped: list[Dropped] = []
    known = rewards or {}
    for episode in episodes:
        reward = known.get(episode.id)
        if any(map(_was_cut_short, episode.interactions)):
            dropped.append(dropped_episode(episode, "cancelled", reward=reward))
        elif all(map(_has_tokens, episode.interactions)) and episode.interactions:
            kept.extend(_examples(episode, reward, cluster_of(episode)))
        else:
            dropped.append(dropped_episode(episode, "no_token_ids", reward=reward))
    return Sifted(kept=tuple(kept), dropped=tuple(dropped))


def has_tokens(prompt_token_ids: Sequence[int], choice: Choice) -> bool:
    """Whether the engine gave the tokens of a prompt and of its answer, each of these with a log-probability."""
    return len(prompt_token_ids) > 0 and 0 < len(choice.token_ids) == len(choice.logprobs)


def prompt_key(example: Example) -> str:
    """Equal for examples that answer the same prompt."""
    if example.token_ids:
        first = next((index for index, trained in enumerate(example.loss_mask) if trained), len(example.token_ids))
        return _tokens_key(example.token_ids[:first])
    first = example.trained_messages[0] if example.trained_messages else len(example.messages)
    return content_hash({"messages": list(example.messages[:first]), "tools": list(example.tools)})


def _was_cut_short(call: Interaction) -> bool:
    return bool(call.choices) and answer_of(call).finish_reason is FinishReason.CANCELLED


def _has_tokens(call: Interaction) -> bool:
    return bool(call.choices) and has_tokens(call.prompt_token_ids, answer_of(call))


def _tokens_key(tokens: Sequence[int]) -> str:
    return content_hash({"tokens": list(tokens)})


def _examples(episode: Episode, reward: float | None, cluster: str) -> list[Fresh]:
    sequences = [_sequence([call]) for call in episode.interactions]
    if all(map(_goes_on, episode.interactions, episode.interactions[1:])):
        sequences = [_sequence(episode.interactions)]
    return [
        Fresh(
            example=Example(
                id=episode.id if len(sequences) == 1 else f"{episode.id} {index}",
                weight=1.0,
                source=EPISODE,
                kind=episode_kind(episode),
                token_ids=tuple(sequence.token_ids),
                loss_mask=tuple(sequence.loss_mask),
                logprobs=tuple(sequence.logprobs) if sequence.comparable else (),
                reward=reward,
                group=_tokens_key(sequence.calls[0].prompt_token_ids),
                cluster=cluster,
                sampled_at=max(call.created_at for call in sequence.calls),
            ),
            user_key=episode.user_key,
            prompt=sequence.calls[-1].messages,
            answer=" ".join(map(_said, sequence.calls)),
        )
        for index, sequence in enumerate(sequences)
    ]


def _goes_on(call: Interaction, following: Interaction) -> bool:
    tokens = call.prompt_token_ids + answer_of(call).token_ids
    return following.prompt_token_ids[: len(tokens)] == tokens


@dataclass(slots=True, kw_only=True)
class _Sequence:
    """Calls that continue one another: ``token_ids``, ``loss_mask`` and ``logprobs`` of length T."""

    calls: Sequence[Interaction]
    token_ids: list[int] = field(default_factory=list[int])
    loss_mask: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])

    @property
    def comparable(self) -> bool:
        """Whether the log-probabilities are those of the distribution that was sampled from."""
        if not all(call.sampling.unfiltered for call in self.calls):
            return False
        return all(math.isfinite(logprob) and logprob <= _ROUNDING for logprob in self.logprobs)


def _sequence(calls: Sequence[Interaction]) -> _Sequence:
    made = _Sequence(calls=calls)
    for call in calls:
        context = call.prompt_token_ids[len(made.token_ids) :]
        choice = answer_of(call)
        made.token_ids += [*context, *choice.token_ids]
        made.loss_mask += [0] * len(context) + [1] * len(choice.token_ids)
        made.logprobs += [*(0.0 for _ in context), *choice.logprobs]
    return made


def _said(call: Interaction) -> str:
    choice = answer_of(call)
    called = (f"{made['function']['name']} {made['function']['arguments']}" for made in choice.tool_calls)
    return " ".join((choice.text, *called))

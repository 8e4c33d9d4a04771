"""Asking what nobody solved once more, with the right answer as a hint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tidegate.core.rationalization import HINT_LEAKED, NOT_ONE_SEQUENCE, mentions_hint, with_hint, without_hint
from tidegate.core.rollout import assistant_message
from tidegate.core.selection.exploring import Asked, is_success
from tidegate.core.selection.sequences import Fresh, token_sequences
from tidegate.core.selection.sifting import RATIONALIZED
from tidegate.core.types import Episode, JsonObject, Messages
from tidegate.cycle.rollouts import Sampler, fault_in
from tidegate.signals.hints import hint_for

_DRAW = "hint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rationalized:
    """Examples that hold no hint, and one item for every unsolved task with what became of it."""

    examples: tuple[Fresh, ...] = ()
    items: tuple[JsonObject, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """Items by reason."""
        return dict(sorted(Counter(str(item["reason"]) for item in self.items).items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hinted:
    asked: Asked
    messages: Messages
    hint: str


async def rationalize(
    sampler: Sampler, unsolved: Sequence[Asked], prompts: Mapping[str, tuple[int, ...]], *, threshold: float
) -> Rationalized:
    """Ask each unsolved task once with a hint and keep the verified answers, without it.

    Args:
        sampler: whom to ask.
        unsolved: tasks with different ids.
        prompts: token ids of their prompts without a hint, by task id; a task without is left out (``no_prompt``).
        threshold: lowest score of a success, in [0, 1].
    """
    reasons: dict[str, str] = {}
    retried: list[_Hinted] = []
    for asked in unsolved:
        hinted = _hinted(asked)
        if hinted is None or asked.task.id not in prompts:
            reasons[asked.task.id] = "no_hint" if hinted is None else "no_prompt"
        else:
            retried.append(hinted)
    answers = await sampler.ask([replace(item.asked.task, messages=item.messages) for item in retried], draw=_DRAW)
    examples: list[Fresh] = []
    for item in retried:
        task_id = item.asked.task.id
        evaluated = answers[task_id]
        reason = fault_in(evaluated)
        if reason is None:
            judged = sampler.record(item.asked, evaluated, draw=_DRAW)
            solved = is_success(judged.verdict, threshold=threshold)
            found = _example(item, judged.episode, prompts[task_id], judged.verdict.score) if solved else "wrong"
            if isinstance(found, Fresh):
                examples.append(found)
            reason = RATIONALIZED if isinstance(found, Fresh) else found
        reasons[task_id] = reason
    items = tuple(
        {"id": asked.task.id, "reason": reasons[asked.task.id], "kind": asked.task.kind, "source": RATIONALIZED}
        for asked in unsolved
    )
    return Rationalized(examples=tuple(examples), items=items)


def _hinted(asked: Asked) -> _Hinted | None:
    hint = hint_for(asked.task)
    messages = None if hint is None else with_hint(asked.task.messages, hint)
    return None if hint is None or messages is None else _Hinted(asked=asked, messages=messages, hint=hint)


def _example(item: _Hinted, episode: Episode, prompt: tuple[int, ...], score: float) -> Fresh | str:
    """What an answer trains once its hint is gone, or why it does not train."""
    first, last = episode.interactions[0], episode.interactions[-1]
    said = (*last.messages[len(first.messages) :], assistant_message(last.choices[0]))
    if mentions_hint(said, item.hint, item.asked.task.messages):
        return HINT_LEAKED
    sequences = token_sequences([episode]).kept
    if len(sequences) != 1:
        return NOT_ONE_SEQUENCE
    example = without_hint(sequences[0].example, hinted_prompt=first.prompt_token_ids, prompt=prompt)
    if isinstance(example, str):
        return example
    return Fresh(
        example=replace(example, reward=score),
        user_key=item.asked.user_key,
        prompt=item.asked.task.messages,
        answer=sequences[0].answer,
    )

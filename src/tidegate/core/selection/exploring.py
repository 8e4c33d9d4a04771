"""Which tasks of the traffic are asked again, and which of the answers to one of them may train.

Only what train users asked is looked at; tasks that dev users asked too are left out, because several verified answers
to one would let a challenger know the screen by heart.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tidegate.core.selection.episodes import deciding_verdict, dropped_episode, is_train, with_consent
from tidegate.core.selection.near_duplicates import PromptIndex
from tidegate.core.selection.sifting import TASK, Dropped, Sifted, rank, sift
from tidegate.core.types import Episode, Messages, Outcome, Task, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A task of the traffic, the user who asked it first, and how many of its judged episodes succeeded."""

    task: Task
    user_key: str
    solved: int
    judged: int

    @property
    def chance(self) -> float:
        """Expected success in (0, 1) by the rule of succession: unseen is 1/2, failed once 1/3, failed twice 1/4."""
        return (self.solved + 1) / (self.judged + 2)


def is_success(verdict: Verdict, *, threshold: float) -> bool:
    """Whether a verdict with a score of at least ``threshold``, in [0, 1], was reached."""
    return verdict.outcome is not Outcome.ABSTAIN and verdict.score >= threshold


def tasks_to_explore(
    episodes: Sequence[Episode],
    verdicts: Mapping[str, Sequence[Verdict]],
    *,
    reserved: Iterable[Messages],
    objection: Callable[[Task], str | None],
    threshold: float,
    most: int,
    seed: int,
) -> Sifted[Asked]:
    """Choose replayable tasks, those first that were solved rarely.

    Args:
        episodes: of train users; others are dropped as ``not_train``, those without a task as ``no_task``.
        verdicts: by episode.
        reserved: prompts whose tasks and near-duplicates are never asked (``asked_by_dev``).
        objection: why a task can't be asked or verified, None where it can.
        threshold: lowest score of a success, in [0, 1].
        most: tasks to choose, >= 0; those beyond are dropped as ``task_cap``.
        seed: decides between tasks that were solved equally often.
    """
    consenting = with_consent(episodes)
    replayable = sift(consenting.kept, _why_not_replayable, dropped_episode)
    index = PromptIndex(reserved)

    def reason_against(asked: Asked) -> str | None:
        return "asked_by_dev" if index.has_near(asked.task.messages) else objection(asked.task)

    possible = sift(_by_task(replayable.kept, verdicts, threshold), reason_against, _dropped_task)
    ordered = sorted(possible.kept, key=lambda asked: (asked.chance, rank(seed, asked.task.id)))
    beyond = tuple(_dropped_task(asked, "task_cap") for asked in ordered[most:])
    dropped = (*consenting.dropped, *replayable.dropped, *possible.dropped, *beyond)
    return Sifted(kept=tuple(ordered[:most]), dropped=dropped)


def surplus(answers: Sequence[Hashable], *, most: int) -> frozenset[int]:
    """Positions of the answers beyond ``most`` (>= 0): copies go first, then the latest.

    Chosen by the order of sampling and not by length, so that what stays is a sample of what the model does; the
    shortest would favour right answers without the working.
    """
    copies = [position for position, answer in enumerate(answers) if answer in answers[:position]]
    first = [position for position in range(len(answers)) if position not in copies]
    return frozenset([*first, *copies][most:])


def _why_not_replayable(episode: Episode) -> str | None:
    if not is_train(episode):
        return "not_train"
    return "no_task" if episode.task is None else None


def _by_task(
    episodes: Sequence[Episode], verdicts: Mapping[str, Sequence[Verdict]], threshold: float
) -> Iterable[Asked]:
    groups: dict[str, list[tuple[Task, Episode]]] = {}
    for episode in sorted(episodes, key=lambda episode: (episode.interactions[0].created_at, episode.id)):
        if episode.task is not None:
            groups.setdefault(episode.task.id, []).append((episode.task, episode))
    for group in groups.values():
        task, first = group[0]
        deciding = [deciding_verdict(task, verdicts.get(episode.id, ())) for _, episode in group]
        judged = [verdict for verdict in deciding if verdict is not None and verdict.outcome is not Outcome.ABSTAIN]
        solved = sum(is_success(verdict, threshold=threshold) for verdict in judged)
        yield Asked(task=task, user_key=first.user_key, solved=solved, judged=len(judged))


def _dropped_task(asked: Asked, reason: str) -> Dropped:
    return Dropped(id=asked.task.id, reason=reason, kind=asked.task.kind, source=TASK)

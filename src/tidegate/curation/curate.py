"""From scored episodes to a training batch.

The order of the steps is part of what they promise: consent and split come before anything else looks at an
episode, caps and budget come after everything that could still drop an example. Whatever goes in comes out
again, as a kept or as a dropped item of the manifest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from tidegate.config.settings import CurationSettings
from tidegate.core.errors import TidegateError
from tidegate.core.selection.demonstrations import demonstration_example, per_prompt, prompt_key, read_demonstration
from tidegate.core.selection.episodes import (
    episode_kind,
    is_train,
    main_line,
    of_train_split,
    successful,
    verdicts_by_episode,
    with_consent,
    with_verdict,
)
from tidegate.core.selection.limits import distinct, per_user, within_budget
from tidegate.core.selection.sequences import Fresh, token_sequences
from tidegate.core.selection.sifting import FEEDBACK, Dropped, Sifted, sift
from tidegate.core.types import Episode, Example, Feedback, Messages, Outcome, Task, Verdict
from tidegate.curation.batch import Batch, example_line, make_batch
from tidegate.ports import Verifier

DEMONSTRATION_METRIC = "demonstration"

_GIVEN = ""  # stands for the user of demonstrations that the operator gives; real user keys are not empty

_Thing = TypeVar("_Thing")


def curate(
    episodes: Sequence[Episode],
    verdicts: Sequence[Verdict],
    feedback: Sequence[Feedback],
    *,
    settings: CurationSettings,
    seed: int,
    verifiers: Mapping[str, Verifier],
    demonstrations: Sequence[Example] = (),
    rationalized: Sequence[Fresh] = (),
    quarantined: Collection[str] = (),
) -> Batch:
    """Choose what trains.

    Steps: consent, split, main line, verdict, success, token sequences, quarantine, exact duplicates, one user's
    share, budget; then demonstrations, those given here and those that came as feedback on train episodes.

    Args:
        episodes: of the train split; others are dropped as ``not_train``.
        verdicts: of these episodes; others are ignored.
        feedback: of all kinds; only ``demonstration`` feedback is an item.
        settings: thresholds and caps.
        seed: decides between equals.
        verifiers: by name; a demonstration on a task must pass the task's verifier, and is dropped when that
            is not among them. Feedback alone trains only where no program can check.
        demonstrations: the operator's own, trained as they are.
        rationalized: verified answers that were found with a hint and hold it no more, with the users whose tasks they
            answer; limits hold for them and traffic together.
        quarantined: ids of examples that trained what was rolled back; none from traffic trains again.

    Returns:
        The batch; the same input in any order gives the same bytes.
    """
    ledger = _Ledger()
    fresh = _fresh(episodes, verdicts, settings, seed, ledger, rationalized=rationalized, quarantined=quarantined)
    shown = ledger.take(_not_quarantined(_demonstrations(episodes, feedback, verifiers, ledger), quarantined))
    given = _unique(demonstrations, ledger)
    given = ledger.take(per_prompt(given, most=settings.max_per_prompt, seed=seed))
    prompts = Counter(prompt_key(item.example) for item in given)
    shown = ledger.take(per_prompt(shown, most=settings.max_per_prompt, seed=seed, used=prompts))
    users = Counter(item.user_key for item in fresh)
    shown = ledger.take(per_user(shown, most=settings.max_per_user, seed=seed, used=users))
    shown = ledger.take(within_budget(shown, budget=settings.max_examples, seed=seed))
    return make_batch(
        [item.example for item in (*fresh, *given, *shown)],
        ledger.dropped,
        seed=seed,
        settings=settings.model_dump(mode="json"),
    )


@dataclass(slots=True)
class _Ledger:
    """Collects what the steps drop."""

    dropped: list[Dropped] = field(default_factory=list[Dropped])

    def take(self, sifted: Sifted[_Thing]) -> tuple[_Thing, ...]:
        self.dropped.extend(sifted.dropped)
        return sifted.kept


def _fresh(
    episodes: Sequence[Episode],
    verdicts: Sequence[Verdict],
    settings: CurationSettings,
    seed: int,
    ledger: _Ledger,
    *,
    rationalized: Sequence[Fresh],
    quarantined: Collection[str],
) -> tuple[Fresh, ...]:
    judged = verdicts_by_episode(verdicts)
    kept = ledger.take(with_consent(sorted(episodes, key=lambda episode: episode.id)))
    kept = ledger.take(of_train_split(kept))
    kept = ledger.take(main_line(kept))
    kept = ledger.take(with_verdict(kept, judged))
    kept = ledger.take(successful(kept, judged, threshold=settings.success_threshold))
    fresh = ledger.take(_not_quarantined([*ledger.take(token_sequences(kept)), *rationalized], quarantined))
    fresh = ledger.take(distinct(fresh, copies=settings.max_per_prompt, seed=seed))
    fresh = ledger.take(per_user(fresh, most=settings.max_per_user, seed=seed))
    return ledger.take(within_budget(fresh, budget=settings.max_examples, seed=seed))


def _not_quarantined(fresh: Sequence[Fresh], quarantined: Collection[str]) -> Sifted[Fresh]:
    """What did not train anything that was rolled back."""

    def reason_against(item: Fresh) -> str | None:
        return "quarantined" if item.example.id in quarantined else None

    def drop(item: Fresh, reason: str) -> Dropped:
        return Dropped(id=item.example.id, reason=reason, kind=item.example.kind, source=item.example.source)

    return sift(fresh, reason_against, drop)


def _unique(demonstrations: Sequence[Example], ledger: _Ledger) -> tuple[Fresh, ...]:
    """The operator's demonstrations without those that are given twice."""
    unique: dict[str, Example] = {}
    for example in sorted(demonstrations, key=lambda example: (example.id, example_line(example))):
        if example.id in unique:
            ledger.dropped.append(
                Dropped(id=example.id, reason="repeated_id", kind=example.kind, source=example.source)
            )
        else:
            unique[example.id] = example
    return tuple(Fresh(example=example, user_key=_GIVEN) for example in unique.values())


def _demonstrations(
    episodes: Sequence[Episode], feedback: Sequence[Feedback], verifiers: Mapping[str, Verifier], ledger: _Ledger
) -> tuple[Fresh, ...]:
    by_episode = {episode.id: episode for episode in episodes}
    by_interaction = {call.id: episode for episode in episodes for call in episode.interactions}
    shown: list[Fresh] = []
    for item in sorted(feedback, key=lambda item: item.id):
        if item.metric_name != DEMONSTRATION_METRIC:
            continue
        found = by_episode.get(item.episode_id or "") or by_interaction.get(item.interaction_id or "")
        result = "unknown_episode" if found is None else _demonstration(item, found, verifiers)
        if isinstance(result, Fresh):
            shown.append(result)
        else:
            kind = "default" if found is None else episode_kind(found)
            ledger.dropped.append(Dropped(id=item.id, reason=result, kind=kind, source=FEEDBACK))
    return tuple(shown)


def _demonstration(item: Feedback, episode: Episode, verifiers: Mapping[str, Verifier]) -> Fresh | str:
    """The example that a piece of feedback shows, or why there is none."""
    if not all(call.consent for call in episode.interactions):
        return "no_consent"
    if not is_train(episode):
        return "not_train"
    opening = next((call for call in episode.interactions if call.main_line), None)
    answer = read_demonstration(item.value)
    if opening is None or answer is None:
        return "no_main_line" if opening is None else "malformed_demonstration"
    task = episode.task
    objection = _objection(task, answer, verifiers)
    if objection is not None:
        return objection
    example = demonstration_example(
        item.id,
        opening=opening.messages if task is None else task.messages,
        tools=opening.tools if task is None else task.tools,
        answer=answer,
        kind=episode_kind(episode),
    )
    return Fresh(example=replace(example, source=FEEDBACK), user_key=episode.user_key)


def _objection(task: Task | None, answer: Messages, verifiers: Mapping[str, Verifier]) -> str | None:
    if task is None:
        return None
    verifier = verifiers.get(task.verifier)
    if verifier is None:
        return "unverifiable_demonstration"
    try:
        verifier.check_reference(task.reference)
        passed = verifier.judge(task, answer).outcome is Outcome.PASS
    except (ValueError, TidegateError):
        return "unverifiable_demonstration"
    return None if passed else "wrong_demonstration"

"""Demonstrations: those that came as feedback on train episodes, and those that the operator gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tidegate.core.errors import TidegateError
from tidegate.core.selection.demonstrations import demonstration_example, read_demonstration
from tidegate.core.selection.episodes import episode_kind, is_train
from tidegate.core.selection.limits import dropped_example
from tidegate.core.selection.sequences import Fresh
from tidegate.core.selection.sifting import FEEDBACK, Dropped, Sifted
from tidegate.core.types import Episode, Example, Feedback, Messages, Outcome, Task
from tidegate.curation.batch import example_line
from tidegate.ports import Verifier

DEMONSTRATION_METRIC = "demonstration"

_GIVEN = ""  # stands for the user of demonstrations that the operator gives; real user keys are not empty


def unique_demonstrations(demonstrations: Sequence[Example]) -> Sifted[Fresh]:
    """The operator's demonstrations without those that are given twice."""
    unique: dict[str, Fresh] = {}
    dropped: list[Dropped] = []
    for example in sorted(demonstrations, key=lambda example: (example.id, example_line(example))):
        item = Fresh(example=example, user_key=_GIVEN)
        if example.id in unique:
            dropped.append(dropped_example(item, "repeated_id"))
        else:
            unique[example.id] = item
    return Sifted(kept=tuple(unique.values()), dropped=tuple(dropped))


def episodes_shown(episodes: Sequence[Episode], feedback: Sequence[Feedback]) -> dict[str, Episode]:
    """The episode that each demonstration is about, by id of the feedback; those about others are left out."""
    by_episode = {episode.id: episode for episode in episodes}
    by_interaction = {call.id: episode for episode in episodes for call in episode.interactions}
    found = {
        item.id: by_episode.get(item.episode_id or "") or by_interaction.get(item.interaction_id or "")
        for item in feedback
        if item.metric_name == DEMONSTRATION_METRIC
    }
    return {identifier: episode for identifier, episode in found.items() if episode is not None}


def shown_demonstrations(
    episodes: Sequence[Episode], feedback: Sequence[Feedback], verifiers: Mapping[str, Verifier]
) -> Sifted[Fresh]:
    """The examples that feedback shows, and why others show none. Feedback of other metrics is no item."""
    about = episodes_shown(episodes, feedback)
    shown: list[Fresh] = []
    dropped: list[Dropped] = []
    for item in sorted(feedback, key=lambda item: item.id):
        if item.metric_name != DEMONSTRATION_METRIC:
            continue
        found = about.get(item.id)
        result = "unknown_episode" if found is None else _demonstration(item, found, verifiers)
        if isinstance(result, Fresh):
            shown.append(result)
        else:
            kind = "default" if found is None else episode_kind(found)
            dropped.append(Dropped(id=item.id, reason=result, kind=kind, source=FEEDBACK))
    return Sifted(kept=tuple(shown), dropped=tuple(dropped))


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

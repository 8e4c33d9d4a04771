"""What a cycle keeps for its report: the releases that answered in its window beside the anchor, and the training run.

Releases of the same content count as one, under the id of the first. The anchor may have left the traffic long ago, so
its latest episodes up to the window's end are taken, whenever they were. Only train and dev episodes are read. What
fails here is listed in the output; the cycle goes on, because nothing that it decides rests on monitors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from tidegate.core.gate.policy import CollapseRules
from tidegate.core.monitors import SHIPPED_LIMITS, RecordedAnswer, by_kind, compare, measure, recorded_answers
from tidegate.core.types import Episode, JsonObject, Split, Verdict
from tidegate.cycle.stages import CycleStages
from tidegate.gate import load_policy
from tidegate.release.records import release_behind
from tidegate.training import TrainingReport

WINDOW_EPISODES = 1_000
"""Most episodes of the window that are measured, the last ones."""
ANCHOR_EPISODES = 1_000

_Value = TypeVar("_Value")


def cycle_monitors(
    stages: CycleStages, config: JsonObject, window: Sequence[Episode], verdicts: Sequence[Verdict]
) -> JsonObject:
    """Measure the window's releases and compare them with the anchor; bounded in time and memory.

    Args:
        stages: of the cycle.
        config: the cycle's, with ``until`` and ``seed``.
        window: its train and dev episodes in order of time.
        verdicts: all that the store holds.

    Returns:
        ``{champion, anchor, episodes, excluded, limits, releases, against_anchor, failed}``: ``excluded`` counts
        episodes by reason, ``limits`` says whose they are, ``releases`` has ``{all, kinds}`` by release id,
        ``against_anchor`` a list of comparisons by release id, ``failed`` a sentence for each thing that failed.
    """
    failed: list[str] = []
    found = _attempted("monitors", lambda: _monitors(stages, config, window, verdicts, failed), failed)
    return {**(found or {}), "failed": failed}


def training_output(report: TrainingReport) -> dict[str, Any]:
    """All that a training run reports, as JSON that a store accepts: null for a number that is not finite.

    A measure of a step may have no finite value; losses and gradient norms are checked by the trainer.
    """
    return _finite({**report.to_json(), **report.summary()})


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _monitors(
    stages: CycleStages,
    config: JsonObject,
    window: Sequence[Episode],
    verdicts: Sequence[Verdict],
    failed: list[str],
) -> dict[str, Any]:
    contents = _first_of_content(stages)
    champion, anchor = (contents[release_behind(stages.releases, alias).id] for alias in ("champion", "anchor"))
    rules = load_policy(stages.settings.policy).collapse
    limits = rules if isinstance(rules, CollapseRules) else SHIPPED_LIMITS
    before = stages.trajectories.list_episodes(
        splits=(Split.TRAIN, Split.DEV),
        until=config["until"],
        releases=[release for release, first in contents.items() if first == anchor],
        latest=ANCHOR_EPISODES,
    )
    episodes = {episode.id: episode for episode in (*before, *window[-WINDOW_EPISODES:])}
    answers, excluded = recorded_answers(list(episodes.values()), verdicts, contents)
    groups = {name: [answer for answer in answers if answer.release == name] for name in _in_order(answers, contents)}
    measured: dict[str, Any] = {}
    compared: dict[str, Any] = {}
    for name, found in groups.items():
        measured[name] = _attempted(f"release {name!r}", partial(_measured, found), failed)
        if name != anchor and anchor in groups:
            against = partial(_compared, found, groups[anchor], limits, seed=int(config["seed"]))
            compared[name] = _attempted(f"release {name!r} against the anchor", against, failed)
    return {
        "champion": champion,
        "anchor": anchor,
        "episodes": len(episodes),
        "excluded": excluded,
        "limits": "policy" if limits is rules else "shipped",
        "releases": {name: figures for name, figures in measured.items() if figures is not None},
        "against_anchor": {name: rows for name, rows in compared.items() if rows is not None},
    }


def _measured(answers: Sequence[RecordedAnswer]) -> dict[str, Any]:
    kinds = {kind: asdict(measure(found)) for kind, found in by_kind(answers).items()}
    return {"all": asdict(measure(answers)), "kinds": kinds}


def _compared(
    answers: Sequence[RecordedAnswer], anchor: Sequence[RecordedAnswer], limits: CollapseRules, *, seed: int
) -> list[dict[str, Any]]:
    return [asdict(one) for one in compare(answers, anchor, limits, seed=seed)]


def _first_of_content(stages: CycleStages) -> dict[str, str]:
    """Release id to the id of the first release of the same content, releases by number."""
    first: dict[str | None, str] = {}
    return {one.id: first.setdefault(one.adapter_sha256, one.id) for one in stages.releases.list_releases()}


def _in_order(answers: Sequence[RecordedAnswer], contents: dict[str, str]) -> list[str]:
    """Releases that answered, by number; those that the store does not know last."""
    places = {release: place for place, release in enumerate(contents)}
    return sorted({answer.release for answer in answers}, key=lambda name: (places.get(name, len(places)), name))


def _attempted(what: str, compute: Callable[[], _Value], failed: list[str]) -> _Value | None:
    """The boundary of the monitors: what raises is named in ``failed``."""
    try:
        return compute()
    except Exception as error:  # noqa: BLE001 - a figure that cannot be computed must not cost a cycle
        failed.append(f"{what}: {type(error).__name__}: {error}")
        return None

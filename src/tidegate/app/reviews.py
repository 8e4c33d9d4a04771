"""People audit a verifier: items of a sealed set to look at, and what becomes of their answers (trigger 3).

A biased verifier defeats every statistic of the gate. Each epoch some of its items are offered to a person, as the
traffic answered them and as the verifier judged that answer; where people disagree too often the verifier is not
believed any more.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tidegate.app.controls import Controlling
from tidegate.core.errors import ConfigError, ConflictError, NotFoundError, TaskFileError
from tidegate.core.gate.controls import VERIFIER_REVIEWED
from tidegate.core.gate.policy import Policy
from tidegate.core.gate.state import Epoch
from tidegate.core.hashing import canonical_json
from tidegate.core.rollout import assistant_message
from tidegate.core.searched import answer_of
from tidegate.core.types import Episode, JsonObject, Outcome, Split, Task, Verdict
from tidegate.gate.keys import KeyPair
from tidegate.ports import Verifier
from tidegate.signals import score_episodes
from tidegate.signals.tasks.file import read_json_lines


def review_items(
    controls: Controlling, policy: Policy, verifiers: dict[str, Verifier], *, epoch_id: str | None
) -> list[JsonObject]:
    """Items of an epoch for a person to judge, as many of each verifier as a review needs, in an order nobody chose.

    Returns:
        Objects with ``epoch``, ``task``, ``verifier``, ``version``, ``messages`` (with the answer that the traffic
        got), ``reference``, the verifier's ``passed``, and ``agree``: null, for the person to set to true or false.

    Raises:
        NotFoundError: there is no such epoch.
    """
    epoch = _epoch(controls, epoch_id)
    tasks = {task.id: task for task in controls.stores.sealed_epochs.epoch_tasks(epoch.id)}
    episodes = controls.stores.sealed_trajectories.list_episodes(splits=(Split.SEALED,))
    mine = {episode.id: episode for episode in episodes if episode.task is not None and episode.task.id in tasks}
    verdicts = score_episodes(list(mine.values()), verifiers, (), controls.now, open_ttl_s=0.0).verdicts
    items = {
        _task_of(mine[verdict.episode_id]).id: _item(epoch, mine[verdict.episode_id], verdict) for verdict in verdicts
    }
    order = sorted(items, key=lambda task_id: hashlib.sha256(f"{epoch.commitment}{task_id}".encode()).hexdigest())
    taken: Counter[str] = Counter()
    chosen: list[JsonObject] = []
    for task_id in order:
        verifier = str(items[task_id]["verifier"])
        if taken[verifier] < policy.triggers.min_audited:
            taken[verifier] += 1
            chosen.append(items[task_id])
    return chosen


def take_review(controls: Controlling, file: Path, key: KeyPair) -> list[JsonObject]:
    """Record a person's judgement of items; one record for each verifier that they name.

    Judgements of a verifier add up over reviews, and are held to the policy in force.

    Raises:
        TaskFileError: a line is not an item, or has no judgement.
        ConflictError: the items name another epoch than one that was opened, or a task twice.
        GateError: a task was reviewed before.
    """
    judged: dict[tuple[str, str, str], dict[str, bool]] = {}
    for number, values in read_json_lines(file):
        try:
            name = (str(values["epoch"]), str(values["verifier"]), str(values["version"]))
            task_id, agree = str(values["task"]), values["agree"]
        except KeyError as error:
            raise TaskFileError(
                f"{file}:{number}: field {error} is missing; an item of 'gate review' has it"
            ) from error
        if not isinstance(agree, bool):
            raise TaskFileError(f"{file}:{number}: field 'agree' is {agree!r}; true or false is accepted")
        if task_id in judged.setdefault(name, {}):
            raise ConflictError(f"{file}:{number}: task {task_id!r} is judged twice")
        judged[name][task_id] = agree
    if not judged:
        raise TaskFileError(f"{file}: the file holds no item; write one with 'tidegate gate review --out FILE'")
    return [_record(controls, name, answers, key) for name, answers in sorted(judged.items())]


def _record(controls: Controlling, name: tuple[str, str, str], answers: dict[str, bool], key: KeyPair) -> JsonObject:
    epoch_id, verifier, version = name
    members = {task.id for task in controls.stores.sealed_epochs.epoch_tasks(_epoch(controls, epoch_id).id)}
    strangers = sorted(set(answers) - members)
    if strangers:
        raise ConflictError(f"tasks {strangers[:5]!r} are none of {epoch_id!r}")
    subject: dict[str, Any] = {"epoch": epoch_id, "verifier": verifier, "version": version, "agree": answers}
    signing = controls.sign(VERIFIER_REVIEWED, subject, key)
    known = controls.state.controls
    reviewed = known.reviews[verifier, version]
    return {
        **signing.to_json(),
        "verifier": verifier,
        "version": version,
        "audited": len(reviewed),
        "disagreed": sum(not agree for agree in reviewed.values()),
        "invalidated": (verifier, version) in known.invalidated,
    }


def _epoch(controls: Controlling, epoch_id: str | None) -> Epoch:
    epochs = controls.state.epochs
    found = [epoch for epoch in epochs if epoch_id in (None, epoch.id)]
    if not found:
        raise NotFoundError(f"epoch {epoch_id!r} was not opened; opened: {[epoch.id for epoch in epochs]!r}")
    return found[-1]


def _item(epoch: Epoch, episode: Episode, verdict: Verdict) -> JsonObject:
    task = _task_of(episode)
    calls = [call for call in episode.interactions if call.main_line]
    return {
        "epoch": epoch.id,
        "task": task.id,
        "verifier": verdict.verifier,
        "version": verdict.version,
        "messages": [*calls[-1].messages, assistant_message(answer_of(calls[-1]))],
        "reference": task.reference,
        "passed": verdict.outcome is Outcome.PASS,
        "detail": verdict.detail,
        "agree": None,
    }


def _task_of(episode: Episode) -> Task:
    assert episode.task is not None  # noqa: S101 - only such episodes are asked for
    return episode.task


def write_items(items: Sequence[JsonObject], file: Path) -> JsonObject:
    """Write items as JSON lines, readable by their owner alone: they are sealed.

    Raises:
        ConflictError: the file exists.
        ConfigError: it cannot be written.
    """
    try:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, prefix=".items.") as out:  # mode 0600
            out.writelines(canonical_json(item) + "\n" for item in items)
            out.flush()
            os.link(out.name, file)  # all of it or nothing, and never over a file that is there
    except FileExistsError as error:
        raise ConflictError(f"{str(file)!r} exists; choose another file") from error
    except OSError as error:
        raise ConfigError(f"{str(file)!r} cannot be written: {error.strerror}; choose another directory") from error
    return {"items": len(items), "file": str(file), "by_verifier": dict(Counter(str(i["verifier"]) for i in items))}

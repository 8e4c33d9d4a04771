"""Choosing what is asked, and asking it once more where an engine failed."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeAlias

from tidegate.core.errors import GateError
from tidegate.core.gate.state import Epoch
from tidegate.core.types import Answer, JsonObject, Sampling, Task
from tidegate.gate.arms import Arm
from tidegate.gate.evaluate import Evaluated, Grading, SamplingOf, call_seed, evaluate_episodes
from tidegate.ports import Engine

SEED_RULE = "sha256(seed, task id, call number)"

Keep: TypeAlias = Callable[[Answer], Awaitable[None]]

_ATTEMPTS = 2  # a second engine error in a row is hardly chance
_SET_PER_CALL = ("n", "seed", "top_logprobs", "json_schema", "tool_choice", "distribution_known", "search")


async def ask(
    engine: Engine,
    arm: Arm,
    tasks: Sequence[Task],
    *,
    sampling: SamplingOf,
    grading: Grading,
    keep: Keep,
    sample: int = 0,
) -> dict[str, Answer]:
    """An arm's answers by task id; those that an engine error cut short were asked twice.

    Args:
        engine: has the arm's adapter loaded.
        arm: who answers.
        tasks: what is asked.
        sampling: decoding settings of each call.
        grading: limits, verifiers and environments.
        keep: awaited with each answer that stands.
        sample: number that the answers get.
    """
    evaluated = await ask_episodes(engine, arm, tasks, sampling=sampling, grading=grading, keep=keep, sample=sample)
    return {task_id: episode.answer for task_id, episode in evaluated.items()}


async def ask_episodes(
    engine: Engine,
    arm: Arm,
    tasks: Sequence[Task],
    *,
    sampling: SamplingOf,
    grading: Grading,
    keep: Keep,
    sample: int = 0,
) -> dict[str, Evaluated]:
    """As :func:`ask`, with the calls and the judgement behind each answer."""
    episodes: dict[str, Evaluated] = {}

    async def on_answer(answer: Answer) -> None:
        if not answer.cut_short:
            await keep(replace(answer, sample=sample))

    for _ in range(_ATTEMPTS):
        wanted = [task for task in tasks if task.id not in episodes or episodes[task.id].answer.cut_short]
        for episode in await evaluate_episodes(
            engine, arm.name, arm.sha256, wanted, sampling=sampling, grading=grading, on_answer=on_answer
        ):
            episodes[episode.answer.task_id] = replace(episode, answer=replace(episode.answer, sample=sample))
    return episodes


def sealed_sample(
    offered: Sequence[tuple[str, Task]], *, used: Collection[str], salt: str, limit: int
) -> tuple[Task, ...]:
    """Tasks for a new epoch: one a user, none used before, chosen by a secret order.

    Args:
        offered: (user key, task).
        used: ids of tasks that some epoch holds or held.
        salt: secret that orders the tasks, so that nobody can place one.
        limit: most tasks.

    Returns:
        At most ``limit`` tasks, ordered by id.
    """

    def rank(entry: tuple[str, Task]) -> tuple[str, str]:
        user, task = entry
        return hashlib.sha256(f"{salt}\n{task.id}".encode()).hexdigest(), user

    users: set[str] = set()
    chosen: dict[str, Task] = {}
    for user, task in sorted(offered, key=rank):
        if len(chosen) == limit:
            break
        if user in users or task.id in chosen or task.id in used:
            continue
        users.add(user)
        chosen[task.id] = task
    return tuple(task for _, task in sorted(chosen.items()))


def check_same_grading(epoch: Epoch, grading: Grading, tasks: Sequence[Task]) -> None:
    """Refuse to compare new answers of an epoch with kept ones that were scored in another way.

    Raises:
        GateError: names the settings that differ from those that the epoch opened with.
    """
    now = grading.fingerprint(tasks)
    differing = [name for name in sorted({*now, *epoch.grading}) if now.get(name) != epoch.grading.get(name)]
    if differing:
        changes = "; ".join(f"{name} was {epoch.grading.get(name)!r}, is {now.get(name)!r}" for name in differing)
        raise GateError(
            f"{epoch.id} opened with another grading: {changes}. Answers kept from before the change can't be compared "
            "with answers from after it, so nothing was asked and no look spent. Restore the setting until the epoch "
            "closes (at its first promotion or after its last look), or leave the epoch behind for a new one of fresh "
            f"tasks: a policy whose sealed.min_pairs is above the {epoch.size} tasks of {epoch.id} does so"
        )


def unique(tasks: Sequence[Task]) -> tuple[Task, ...]:
    """One task an id, ordered by id."""
    return tuple(task for _, task in sorted({task.id: task for task in tasks}.items()))


def seeded(decoding: Sampling, seed: str) -> SamplingOf:
    """``decoding`` with one choice and a seed of its own for each call, equal for every arm.

    Every answer is held to the task's schema, the first one to the call that the task asks for.
    """

    def sampling(task: Task, call_number: int) -> Sampling:
        return replace(
            decoding,
            n=1,
            top_logprobs=0,
            seed=call_seed(seed, task.id, call_number),
            json_schema=task.json_schema,
            tool_choice=task.tool_choice if call_number == 0 else None,
        )

    return sampling


def decoding_to_json(decoding: Sampling) -> dict[str, Any]:
    """The settings that shape the distribution sampled from, as a record holds them."""
    values = {name: value for name, value in asdict(decoding).items() if name not in _SET_PER_CALL}
    if decoding.parallel_tool_calls:  # usual, and unknown to records from before there was a choice
        del values["parallel_tool_calls"]
    return {**values, "stop": list(decoding.stop)}


def decoding_from_json(values: JsonObject) -> Sampling:
    """The settings that :func:`decoding_to_json` wrote."""
    settings: dict[str, Any] = {**values, "stop": tuple(values["stop"])}
    return Sampling(**settings)

"""The step that asks the champion again: several answers to each of some tasks, and a hint where none was right.

What comes out are episodes and verdicts like those of the traffic, but of no user's making; they lie beside the
batches. Off unless the settings say otherwise.

Source: Zelikman et al. (2022), STaR; Yuan et al. (2023), Scaling Relationship on Learning Mathematical Reasoning with
Large Language Models (several distinct answers a task).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from tidegate.config.settings import RolloutSettings
from tidegate.core.errors import ConfigError
from tidegate.core.selection.episodes import verdicts_by_episode
from tidegate.core.selection.exploring import Asked, is_success, surplus, tasks_to_explore
from tidegate.core.selection.sifting import Sifted
from tidegate.core.types import Episode, JsonObject, Sampling, Split, Task
from tidegate.curation import Judged, Rollouts, make_rollouts, no_rollouts, read_rollouts, write_rollouts
from tidegate.cycle.machine import CycleOutcome, Outputs, Report, Step, StepResult
from tidegate.cycle.rationalize import Rationalized, rationalize
from tidegate.cycle.rollouts import REMEDIES, Sampler, fault_in
from tidegate.cycle.stages import CycleStages, arm_of, progress_of, traffic_decoding
from tidegate.gate.arms import loaded
from tidegate.gate.asking import decoding_to_json
from tidegate.release import BARE_BASE

ROLLOUT = "rollout"


async def explore(stages: CycleStages, config: JsonObject, outputs: Outputs, report: Report) -> StepResult:
    """Ask the weights that the cycle starts from again; too many faults end the cycle without a conclusion."""
    del outputs
    if config["proposed"]:
        return StepResult(output={"proposed": config["proposed"]})
    settings = RolloutSettings.model_validate(config.get("rollouts", {}))  # older cycles were opened without
    if settings.samples == 0:
        return StepResult(output={"rollouts": "none"})
    threshold = float(config["curation"]["success_threshold"])
    plan = await asyncio.to_thread(_plan, stages, config, settings, threshold)
    async with _sampler(stages, config, plan, settings, report) as sampler:
        # Objectives that compare the answers of a group need all of them: without some right ones its mean is too low.
        most = settings.keep_per_task if config["training"]["objective"] == "sft" else settings.samples
        answers = await _ask(sampler, plan.chosen.kept, settings.samples, most=most, threshold=threshold)
        if answers.faults.total() > settings.max_error_share * answers.asked:
            return _abstained(answers, settings)
        retried = Rationalized()
        # Without a group and recorded probabilities only the likelihood can learn from it.
        if settings.rationalize and config["training"]["objective"] == "sft":
            unsolved = [asked for asked in plan.chosen.kept if not asked.solved and asked.task.id not in answers.solved]
            retried = await rationalize(sampler, unsolved, answers.prompts, threshold=threshold)
    rollouts = _rollouts(stages, config, plan, answers, retried)
    path = await asyncio.to_thread(write_rollouts, rollouts, stages.rollouts_dir)
    output = {
        "rollouts_hash": rollouts.hash,
        "path": str(path.relative_to(stages.rollouts_dir)),
        "counts": rollouts.manifest["counts"],
    }
    return StepResult(output=output, reasons=(_told(plan, answers, retried, settings),))


def rollouts_of(stages: CycleStages, outputs: Outputs) -> Rollouts:
    """What the step put out, for the step that curates.

    Raises:
        ConfigError: the files were removed or changed.
    """
    path = outputs.get(Step.EXPLORE, {}).get("path")
    return no_rollouts() if path is None else read_rollouts(stages.rollouts_dir / str(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    chosen: Sifted[Asked]
    decoding: Sampling


@dataclass(slots=True, kw_only=True)
class _Answers:
    """Episodes for curation, an item for every answer, prompts and solved tasks by task id."""

    judged: list[Judged] = field(default_factory=list[Judged])
    items: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    prompts: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    solved: set[str] = field(default_factory=set[str])
    passed: int = 0
    faults: Counter[str] = field(default_factory=Counter[str])

    @property
    def asked(self) -> int:
        return len(self.items)

    @property
    def counts(self) -> dict[str, int]:
        """Answers by what became of them, and how many were asked for, given, and right."""
        reasons = Counter(str(item["reason"]) for item in self.items)
        totals = {"asked": self.asked, "answered": self.asked - self.faults.total(), "passed": self.passed}
        return dict(sorted((reasons | totals).items()))


def _plan(stages: CycleStages, config: JsonObject, settings: RolloutSettings, threshold: float) -> _Plan:
    episodes = stages.trajectories.list_episodes(splits=(Split.TRAIN,), after=config["after"], until=config["until"])
    dev = stages.trajectories.list_episodes(splits=(Split.DEV,), until=config["until"])
    chosen = tasks_to_explore(
        episodes,
        verdicts_by_episode(stages.trajectories.list_verdicts()),
        reserved=[episode.task.messages for episode in dev if episode.task is not None],
        objection=_objection_of(stages),
        threshold=threshold,
        most=settings.max_tasks,
        seed=int(config["seed"]),
    )
    return _Plan(chosen=chosen, decoding=_decoding(episodes, settings))


def _decoding(episodes: Sequence[Episode], settings: RolloutSettings) -> Sampling:
    """The traffic's limits and stops; nothing filters, so that log-probabilities are those sampled from."""
    traffic = traffic_decoding([episode for episode in episodes if episode.task is not None])
    return replace(
        traffic,
        temperature=settings.temperature,
        top_p=1.0,
        top_k=0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
    )


def _objection_of(stages: CycleStages) -> Callable[[Task], str | None]:
    def objection(task: Task) -> str | None:
        """Why a task can't be asked or verified here."""
        verifier = stages.verifiers.get(task.verifier)
        if verifier is None:
            return "unknown_verifier"
        if task.environment is not None and task.environment not in stages.grading.environments:
            return "unknown_environment"
        try:
            verifier.check_reference(task.reference)
        except ValueError:
            return "bad_reference"
        except ConfigError:
            return "verifier_unavailable"
        return None

    return objection


@asynccontextmanager
async def _sampler(
    stages: CycleStages, config: JsonObject, plan: _Plan, settings: RolloutSettings, report: Report
) -> AsyncGenerator[Sampler]:
    arm = arm_of(stages, config["champion_sha256"])
    # The first release with these weights: a rollback in the meantime makes another, which a resumed run must not name.
    named = {release.adapter_sha256: release.id for release in reversed(stages.releases.list_releases())}
    done, wanted, tell = 0, len(plan.chosen.kept) * settings.samples, progress_of(report)

    def on_answer() -> None:
        nonlocal done
        done += 1
        tell("champion", done, max(done, wanted))  # hints come on top

    async with stages.open_engine() as engine, loaded(engine, arm):
        yield Sampler(
            engine=engine,
            arm=arm,
            grading=stages.grading,
            decoding=plan.decoding,
            seed=int(config["seed"]),
            release_id=named.get(config["champion_sha256"], BARE_BASE),
            time=float(config["until"]),
            on_answer=on_answer,
        )


async def _ask(sampler: Sampler, chosen: Sequence[Asked], samples: int, *, most: int, threshold: float) -> _Answers:
    """Ask each task ``samples`` times; of the right answers to one all beyond ``most`` are surplus."""
    draws = [f"sample {number}" for number in range(samples)]
    drawn = {draw: await sampler.ask([asked.task for asked in chosen], draw=draw) for draw in draws}
    answers = _Answers()
    for asked in chosen:
        task = asked.task
        judged: list[Judged] = []
        for draw in draws:
            evaluated = drawn[draw][task.id]
            fault = fault_in(evaluated)
            if fault is not None:
                answers.faults[fault] += 1
                answers.items.append(_item(asked, fault))
                continue
            judged.append(sampler.record(asked, evaluated, draw=draw))
            answers.prompts.setdefault(task.id, evaluated.calls[0].prompt_token_ids)
        right = [item for item in judged if is_success(item.verdict, threshold=threshold)]
        tokens = [
            tuple((call.prompt_token_ids, call.choices[0].token_ids) for call in item.episode.interactions)
            for item in right
        ]
        beyond = {right[position].episode.id for position in surplus(tokens, most=most)}
        kept = [item for item in judged if item.episode.id not in beyond]
        answers.judged += kept
        answers.items += [_item(asked, item.verdict.outcome.value, item) for item in kept]
        answers.items += [_item(asked, "surplus", item) for item in judged if item.episode.id in beyond]
        answers.passed += len(right)
        answers.solved |= {task.id} if right else set()
    return answers


def _item(asked: Asked, reason: str, judged: Judged | None = None) -> dict[str, Any]:
    identifier = asked.task.id if judged is None else judged.episode.id
    return {"id": identifier, "task": asked.task.id, "reason": reason, "kind": asked.task.kind, "source": ROLLOUT}


def _rollouts(
    stages: CycleStages, config: JsonObject, plan: _Plan, answers: _Answers, retried: Rationalized
) -> Rollouts:
    tasks = [asked.task for asked in plan.chosen.kept]
    left_out = Counter(item.reason for item in plan.chosen.dropped)
    dropped = [
        {"id": item.id, "reason": item.reason, "kind": item.kind, "source": item.source}
        for item in sorted(plan.chosen.dropped, key=lambda item: (item.id, item.reason))
    ]
    account = {
        "seed": config["seed"],
        "champion_sha256": config["champion_sha256"],
        "settings": dict(config["rollouts"]),
        "decoding": decoding_to_json(plan.decoding),
        "grading": stages.grading.fingerprint(tasks),
        "counts": {
            "tasks": {"asked": len(tasks), **dict(sorted(left_out.items()))},
            "answers": answers.counts,
            "hints": retried.counts,
        },
        "items": [*dropped, *answers.items, *retried.items],
    }
    return make_rollouts(answers.judged, retried.examples, account=account)


def _abstained(answers: _Answers, settings: RolloutSettings) -> StepResult:
    faults = sorted(answers.faults.items(), key=lambda fault: (-fault[1], fault[0]))
    reason = (
        f"{answers.faults.total()} of {answers.asked} answers of the champion say nothing of it or can't be trained "
        f"on, more than rollouts.max_error_share = {settings.max_error_share:g} accepts "
        f"({', '.join(f'{name} {count}' for name, count in faults)}); most often {REMEDIES[faults[0][0]]}"
    )
    output = {"counts": {"answers": answers.counts}}
    return StepResult(output=output, ends=CycleOutcome.ABSTAINED, reasons=(reason,))


def _told(plan: _Plan, answers: _Answers, retried: Rationalized, settings: RolloutSettings) -> str:
    text = (
        f"{len(plan.chosen.kept)} tasks asked {settings.samples} times: {answers.asked - answers.faults.total()} of "
        f"{answers.asked} answered, {answers.passed} passed"
    )
    return f"{text}; {len(retried.examples)} of {len(retried.items)} unsolved tasks rationalized"

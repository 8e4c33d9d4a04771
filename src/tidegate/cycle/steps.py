"""What each step of a cycle does, with the stages that it is given.

Nothing here holds state between steps: a step reads the frozen configuration and the outputs of the steps
before it, and everything that it puts out is named by its content. What a killed process left behind is found
again and used.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tidegate.config.engine import RECORDER_ONLY
from tidegate.core.gate.decisions import Reply, ScreenAbstained, ScreenPassed, reasons_of
from tidegate.core.selection.sifting import KEPT, REPLAY
from tidegate.core.types import Candidate, CandidateState, Episode, JsonObject, Outcome, Split, Verdict
from tidegate.curation import EXAMPLES_FILE, Batch, curate, write_batch
from tidegate.cycle.choosing_share import choose_share
from tidegate.cycle.explore import explore, rollouts_of
from tidegate.cycle.going_live import canary, publish
from tidegate.cycle.machine import CycleOutcome, Outputs, Report, Step, StepFunction, StepResult
from tidegate.cycle.monitoring import cycle_monitors, training_output
from tidegate.cycle.replaying import earlier_examples
from tidegate.cycle.searching import judged_groups, no_groups
from tidegate.cycle.stages import (
    CycleStages,
    arm_of,
    candidate_of,
    move,
    progress_of,
    served_content,
    traffic_decoding,
)
from tidegate.cycle.unseen import AskedInTheOpen, unseen
from tidegate.ports import CycleStore
from tidegate.signals import score_episodes, verdict_key
from tidegate.training import TrainingJob, run_training


def cycle_steps(stages: CycleStages) -> dict[Step, StepFunction]:
    """The steps in order, bound to their stages."""
    return {
        Step.COLLECT: _Bound(stages, collect),
        Step.EXPLORE: _Bound(stages, explore),
        Step.CURATE: _Bound(stages, curate_batch),
        Step.TRAIN: _Bound(stages, train),
        Step.SCREEN: _Bound(stages, screen),
        Step.CERTIFY: _Bound(stages, certify),
        Step.CANARY: _Bound(stages, canary),
        Step.PUBLISH: _Bound(stages, publish),
    }


@dataclass(frozen=True, slots=True)
class _Bound:
    stages: CycleStages
    function: Callable[[CycleStages, JsonObject, Outputs, Report], Awaitable[StepResult]]

    async def __call__(self, config: JsonObject, outputs: Outputs, report: Report) -> StepResult:
        return await self.function(self.stages, config, outputs, report)


def new_config(stages: CycleStages, cycles: CycleStore, *, proposed: str | None) -> JsonObject:
    """What is frozen when a cycle opens: its window of traffic, seed, and the weights it starts from.

    The window begins where the last cycle ended that published something, so that refused and abandoned
    evidence is used again. ``batches`` names what earlier cycles trained on, oldest first.
    """
    aliases = stages.releases.aliases()
    shas = {release.id: release.adapter_sha256 for release in stages.releases.list_releases()}
    after, number = 0.0, 0
    batches: dict[str, None] = {}
    for cycle in cycles.list_cycles():
        number += 1
        done = cycles.steps(cycle["id"])
        collected, curated = done.get(Step.COLLECT.value), done.get(Step.CURATE.value)
        if curated is not None and "manifest_hash" in curated["output"] and Step.TRAIN.value in done:
            batches[str(curated["output"]["manifest_hash"])] = None
        if cycle["outcome"] == CycleOutcome.DONE.value and collected is not None:
            after = max(after, float(collected["output"].get("until", 0.0)))
    return {
        "number": number + 1,
        "after": after,
        "until": stages.clock(),
        "seed": stages.settings.training.seed + number,
        "champion_sha256": shas.get(aliases.get("champion", "")),
        "proposed": proposed,
        "rollouts": stages.settings.rollouts.model_dump(mode="json"),
        "batches": list(batches),
        "curation": stages.settings.curation.model_dump(mode="json"),
        "training": stages.settings.training.model_dump(mode="json"),
    }


async def collect(stages: CycleStages, config: JsonObject, outputs: Outputs, report: Report) -> StepResult:
    """Judge every episode of the window that has no verdict yet, and measure who answered."""
    del outputs, report
    if config["proposed"]:
        return StepResult(output={"proposed": config["proposed"]})

    def run() -> JsonObject:
        episodes = _window(stages, config, (Split.TRAIN, Split.DEV))
        known = {verdict_key(verdict) for verdict in stages.trajectories.list_verdicts()}
        scoring = score_episodes(
            episodes,
            stages.verifiers,
            known,
            stages.clock,
            open_ttl_s=stages.settings.server.episode_ttl_s,
            max_calls=stages.settings.cycle.max_calls,
        )
        stages.trajectories.append_verdicts(scoring.verdicts)
        verdicts = stages.trajectories.list_verdicts()
        return {
            "until": config["until"],
            "episodes": len(episodes),
            "counts": scoring.counts,
            "success": _success_by_kind(episodes, verdicts),
            "monitors": cycle_monitors(stages, config, episodes, verdicts),
        }

    return StepResult(output=await asyncio.to_thread(run))


async def curate_batch(stages: CycleStages, config: JsonObject, outputs: Outputs, report: Report) -> StepResult:
    """Choose what trains; too little of it ends the cycle without a conclusion."""
    del report
    if config["proposed"]:
        return StepResult(output={"proposed": config["proposed"]})
    settings = stages.settings.curation.model_validate(config["curation"])
    objective = stages.settings.training.model_validate(config["training"]).objective

    def run() -> StepResult:
        rollouts = rollouts_of(stages, outputs)
        earlier = earlier_examples(stages, config.get("batches", ()), until=float(config["until"]))
        window = _window(stages, config, (Split.TRAIN,))
        groups = no_groups() if objective == "sft" else judged_groups(stages, window)
        batch = curate(
            [*window, *groups.episodes, *rollouts.episodes],
            [*stages.trajectories.list_verdicts(), *groups.verdicts, *rollouts.verdicts],
            [given for given in stages.trajectories.list_feedback() if given.created_at <= config["until"]],
            settings=settings,
            seed=int(config["seed"]),
            now=float(config["until"]),
            verifiers=stages.verifiers,
            rationalized=rollouts.rationalized,
            quarantined=_quarantined_examples(stages),
            replay=earlier.examples,
            keep_failures=objective != "sft",
        )
        path = write_batch(batch, stages.batches_dir)
        stages.manifests.add_manifest(batch.hash, batch.manifest, time=stages.clock())
        output = {
            "manifest_hash": batch.hash,
            "path": str(path.relative_to(stages.batches_dir)),
            "fresh": batch.fresh,
            "examples": len(batch.examples),
            "by_kind": dict(sorted(Counter(example.kind for example in batch.examples).items())),
            "by_source": dict(sorted(Counter(example.source for example in batch.examples).items())),
            "with_logprobs": sum(bool(example.logprobs) for example in batch.examples),
            "counts": dict(batch.counts),
            "earlier": dict(earlier.counts),
        }
        if batch.fresh < settings.min_fresh:
            reason = f"{batch.fresh} of {settings.min_fresh} fresh verified examples that a cycle needs"
            return StepResult(output=output, ends=CycleOutcome.ABSTAINED, reasons=(reason, *_without_tokens(batch)))
        return StepResult(output=output)

    return await asyncio.to_thread(run)


def _without_tokens(batch: Batch) -> tuple[str, ...]:
    """What an operator can do about answers that nobody can train on."""
    lacking = batch.counts.get("no_token_ids", 0)
    if not lacking:
        return ()
    reason = f"no_token_ids: {lacking} episodes lack token ids or log-probabilities, which the engine did not give"
    return (reason,)


async def train(stages: CycleStages, config: JsonObject, outputs: Outputs, report: Report) -> StepResult:
    """Train in a process of its own, and register what comes out, or an average with the champion, as a candidate."""
    if config["proposed"]:
        candidate = _register(stages, str(config["proposed"]), origin="proposed")
        output: JsonObject = {"proposed": candidate.adapter_sha256, "adapter_sha256": candidate.adapter_sha256}
        return StepResult(output={**output, "candidate": candidate.id})
    if stages.base_model is None:
        return StepResult(output={}, ends=CycleOutcome.ABSTAINED, reasons=(RECORDER_ONLY,))
    job = _job(stages, config, outputs[Step.CURATE], base_model=stages.base_model)
    trained = await asyncio.to_thread(
        run_training, job, timeout_s=job.training.timeout_s, nice=stages.settings.cycle.nice, on_progress=report
    )
    sha256, output = trained.adapter_sha256, training_output(trained)
    if job.training.averaging and job.parent_sha256 is not None:
        dev = await asyncio.to_thread(_dev_episodes, stages, config)
        chosen = await choose_share(
            stages, config, champion=job.parent_sha256, challenger=sha256, dev=dev, report=report
        )
        sha256, output = chosen.adapter_sha256, {**output, "averaging": chosen.measured}
    elif job.training.averaging:
        output = {**output, "averaging": {"share": 1.0, "why": "training did not start from a champion"}}
    candidate = _register(
        stages, sha256, origin="cycle", manifest_hash=job.manifest_hash, parent_sha256=job.parent_sha256
    )
    proposed = {
        "candidate": candidate.id,
        "adapter_sha256": sha256,
        "adapter_path": str(stages.adapters_dir / sha256),
        "trained_sha256": trained.adapter_sha256,
    }
    return StepResult(output={**output, **proposed})


async def screen(stages: CycleStages, config: JsonObject, outputs: Outputs, report: Report) -> StepResult:
    """The free look at dev users' tasks."""
    candidate = candidate_of(stages, outputs)
    if candidate.state is not CandidateState.PROPOSED:
        return _decided_before(candidate)
    episodes = [episode for episode in _dev_episodes(stages, config) if episode.task is not None]
    dev = [episode.task for episode in episodes if episode.task is not None]
    async with stages.open_gate(progress_of(report)) as gate:
        screened = await gate.screen_candidate(
            candidate,
            challenger=arm_of(stages, candidate.adapter_sha256),
            champion=arm_of(stages, served_content(stages, "champion")),
            anchor=arm_of(stages, served_content(stages, "anchor")),
            dev=dev,
            decoding=traffic_decoding(episodes),
        )
    reasons = reasons_of(screened.result)
    output = {"dev_tasks": len(dev), "audit_seq": screened.record.seq, "reasons": list(reasons)}
    if isinstance(screened.result, ScreenPassed):
        move(stages, candidate, CandidateState.SCREENED, reasons)
        return StepResult(output=output, reasons=reasons)
    if isinstance(screened.result, ScreenAbstained):
        return StepResult(output=output, ends=CycleOutcome.ABSTAINED, reasons=reasons)
    move(stages, candidate, CandidateState.REJECTED, reasons)
    return StepResult(output=output, ends=CycleOutcome.REFUSED, reasons=reasons)


async def certify(stages: CycleStages, config: JsonObject, outputs: Outputs, report: Report) -> StepResult:
    """The look at sealed users' tasks that decides."""
    del config
    candidate = candidate_of(stages, outputs)
    episodes = await asyncio.to_thread(stages.sealed_episodes)
    replayable = [episode for episode in episodes if episode.task is not None]
    asked = await asyncio.to_thread(AskedInTheOpen, stages.trajectories)
    tasks, excluded = await asyncio.to_thread(unseen, asked, replayable)
    champion = served_content(stages, "champion")
    async with stages.open_gate(progress_of(report)) as gate:
        certified = await gate.certify_candidate(
            candidate,
            challenger=arm_of(stages, candidate.adapter_sha256),
            champion=arm_of(stages, champion),
            anchor=arm_of(stages, served_content(stages, "anchor")),
            tasks=tasks,
            asked_in_the_open=asked.holds,
            decoding=traffic_decoding(replayable),
        )
    # The log keeps the evidence; the proposing side, which this output is, learns one word.
    output = {
        "reply": certified.reply.value,
        "audit_seq": certified.record.seq,
        "champion_sha256": champion,
        "excluded": excluded,
    }
    if certified.reply is Reply.ABSTAIN:
        looked = certified.record.body["epoch"] is not None  # what is missing then tells what was there
        reason = (
            f"the gate has not enough evidence; audit record {certified.record.seq} says to operators what is missing"
        )
        reasons = (reason,) if looked else reasons_of(certified.decision)
        return StepResult(output=output, ends=CycleOutcome.ABSTAINED, reasons=reasons)
    if certified.reply is Reply.REJECT:
        move(stages, candidate, CandidateState.REJECTED, ("the gate rejected it",))
        reason = f"the gate rejected it; audit record {certified.record.seq} says why to operators"
        return StepResult(output=output, ends=CycleOutcome.REFUSED, reasons=(reason,))
    assert certified.certificate is not None  # noqa: S101 - a promotion always carries one
    stages.save_certificate(certified.certificate)
    move(stages, candidate, CandidateState.CERTIFIED, ("the gate certified it",))
    return StepResult(output=output, reasons=reasons_of(certified.decision))


def _job(stages: CycleStages, config: JsonObject, curated: JsonObject, *, base_model: Path) -> TrainingJob:
    """Training on the curated batch, from the weights that the frozen configuration names."""
    settings = stages.settings.training.model_validate(config["training"])
    champion = config["champion_sha256"] if settings.restart == "champion" else None
    parent = str(champion) if champion else None
    return TrainingJob(
        examples=stages.batches_dir / str(curated["path"]) / EXAMPLES_FILE,
        base_model=base_model,
        base_sha256=stages.base_sha256,
        initial_adapter=stages.adapters_dir / parent if parent else None,
        training=settings,
        manifest_hash=str(curated["manifest_hash"]),
        parent_sha256=parent,
        output_root=stages.adapters_dir,
        threads=stages.settings.model.threads,
        seed=int(config["seed"]),
        success_threshold=float(config["curation"]["success_threshold"]),
    )


def _register(
    stages: CycleStages,
    sha256: str,
    *,
    origin: str,
    manifest_hash: str | None = None,
    parent_sha256: str | None = None,
) -> Candidate:
    candidate = Candidate(
        id=f"cand-{sha256[:8]}",
        adapter_sha256=sha256,
        base_sha256=stages.base_sha256,
        manifest_hash=manifest_hash,
        parent_sha256=parent_sha256,
        state=CandidateState.PROPOSED,
        created_at=stages.clock(),
        origin=origin,
    )
    stages.releases.add_candidate(candidate)
    return candidate


def _success_by_kind(episodes: Sequence[Episode], verdicts: Sequence[Verdict]) -> dict[str, list[int]]:
    """Passes and verdicts of each kind of tasks among some episodes."""
    kinds = {episode.id: episode.task.kind for episode in episodes if episode.task is not None}
    judged = [verdict for verdict in verdicts if verdict.episode_id in kinds]
    asked = Counter(kinds[verdict.episode_id] for verdict in judged)
    passed = Counter(kinds[verdict.episode_id] for verdict in judged if verdict.outcome is Outcome.PASS)
    return {kind: [passed[kind], asked[kind]] for kind in sorted(asked)}


def _quarantined_examples(stages: CycleStages) -> frozenset[str]:
    """Ids of everything that batches trained afresh whose candidates were rolled back; what they replayed had trained
    champions that were good."""
    manifests = (stages.manifests.get_manifest(name) for name in sorted(stages.quarantined()))
    items = (item for manifest in manifests if manifest is not None for item in manifest["items"])
    return frozenset(str(item["id"]) for item in items if item["reason"] == KEPT and item["source"] != REPLAY)


def _window(stages: CycleStages, config: JsonObject, splits: Sequence[Split]) -> list[Episode]:
    return stages.trajectories.list_episodes(splits=splits, after=config["after"], until=config["until"])


def _dev_episodes(stages: CycleStages, config: JsonObject) -> list[Episode]:
    """The latest dev episodes up to the end of the window."""
    episodes = stages.trajectories.list_episodes(splits=(Split.DEV,), until=config["until"])
    return episodes[-stages.settings.cycle.max_dev_tasks :]


def _decided_before(candidate: Candidate) -> StepResult:
    """How a screen ends for a candidate that passed one already, or whose weights were decided before."""
    output = {"state": candidate.state.value}
    if candidate.state in (CandidateState.SCREENED, CandidateState.CERTIFIED):
        return StepResult(output=output)
    reason = f"candidate {candidate.id!r} holds weights that are {candidate.state.value!r} already"
    return StepResult(output=output, ends=CycleOutcome.REFUSED, reasons=(reason,))

"""The steps that bring a certified candidate before users: a canary where the policy asks for one, then all of them."""

from __future__ import annotations

import asyncio

from tidegate.core.gate.live_records import trial_status
from tidegate.core.gate.live_state import Trial
from tidegate.core.types import Candidate, CandidateState, JsonObject
from tidegate.cycle.machine import CycleOutcome, Outputs, Report, Step, StepResult
from tidegate.cycle.stages import CycleStages, candidate_of, move, served_content, short
from tidegate.release import BARE_BASE


async def canary(stages: CycleStages, config: JsonObject, outputs: Outputs, report: Report) -> StepResult:
    """Start the canary that the policy asks for, or say how far it is; its decision is taken beside serving."""
    del config, report
    if stages.canary is None:
        return StepResult(output={"canary": "none"})
    candidate = candidate_of(stages, outputs)
    judged_against = outputs[Step.CERTIFY]["champion_sha256"]
    trial = await asyncio.to_thread(stages.canary.trial, candidate.id)
    if trial is None:
        served = served_content(stages, "champion")
        if served != judged_against:
            return _another_champion(stages, candidate, judged_against, served)
        await stages.canary.start(candidate.id, judged_against or BARE_BASE)
        trial = await asyncio.to_thread(stages.canary.trial, candidate.id)
    if trial is None or not trial.carried_out:
        shown = {} if trial is None else trial_status(trial)
        reason = "the canary has not started" if trial is None else _how_far(trial)
        return StepResult(output={"canary": shown}, ends=CycleOutcome.WAITING, reasons=(reason,))
    output = {"canary": trial_status(trial), "release": trial.subject_release}
    state = candidate_of(stages, outputs).state
    if trial.decision == "promote" and state is not CandidateState.REJECTED:
        return StepResult(output=output, reasons=(trial.reason,))
    reason = trial.reason if trial.decision != "promote" else "promoted, but another champion had come in the meantime"
    return StepResult(output={**output, "release": None}, ends=CycleOutcome.REFUSED, reasons=(reason,))


async def publish(stages: CycleStages, config: JsonObject, outputs: Outputs, report: Report) -> StepResult:
    """Hot-swap the certified candidate into serving, unless the champion that it was judged against has changed."""
    del config, report
    candidate = candidate_of(stages, outputs)
    judged_against = outputs[Step.CERTIFY]["champion_sha256"]
    if outputs[Step.CANARY].get("release") is not None:
        release_id = str(outputs[Step.CANARY]["release"])
        return StepResult(output={"release": release_id}, reasons=(f"serving {release_id} since its canary ended",))
    served = served_content(stages, "champion")
    if served not in (judged_against, candidate.adapter_sha256):
        return _another_champion(stages, candidate, judged_against, served)
    release = await stages.publish(candidate.id, judged_against or BARE_BASE)
    return StepResult(output={"release": release["id"]}, reasons=(f"serving {release['id']}",))


def _another_champion(
    stages: CycleStages, candidate: Candidate, judged_against: str | None, served: str | None
) -> StepResult:
    reason = f"the champion changed from {short(judged_against)} to {short(served)} while it was judged"
    move(stages, candidate, CandidateState.REJECTED, (reason,))
    return StepResult(output={"champion_sha256": served}, ends=CycleOutcome.REFUSED, reasons=(reason,))


def _how_far(trial: Trial) -> str:
    """One sentence for whoever waits."""
    if trial.decision is not None:
        return f"the canary's decision ({trial.decision}) waits for a running server to carry it out"
    said = trial.reason or f"0 of {trial.canary.horizon_pairs} pairs"
    return f"the canary goes on while 'tidegate serve' runs: {said}; run 'tidegate cycle run' again later"

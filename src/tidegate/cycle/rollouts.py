"""Asking tasks of the traffic again in this process, and recording the answers as the gateway would have."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tidegate.core.hashing import content_hash
from tidegate.core.selection.exploring import Asked
from tidegate.core.selection.sequences import has_tokens
from tidegate.core.types import Answer, Episode, Interaction, Outcome, Sampling, Split, Task, Verdict
from tidegate.curation import Judged
from tidegate.gate import Arm, Grading
from tidegate.gate.asking import ask_episodes, seeded
from tidegate.gate.evaluate import Call, Evaluated
from tidegate.ports import Engine
from tidegate.ports.signals import VERIFIER_ERROR
from tidegate.signals.verifiers.findings import INVALID_TOOL_CALL, NO_REPLY

REMEDIES = {
    "engine_error": "the engine failed: mend what its log names, and run the cycle again",
    "environment_error": "a task's tools failed: mend the environment, and run the cycle again",
    "timeout": "an answer took too long: raise cycle.episode_timeout_s or lower cycle.concurrency",
    "no_verdict": "a verifier gave no verdict: mend it, and run the cycle again",
    "no_token_ids": "the engine gave no token ids or log-probabilities to train on: take one that gives both, or set "
    "rollouts.samples = 0",
}
"""What each fault that :func:`fault_in` names was, and what to do about it."""

_FAULTS = {
    "engine": "engine_error",
    "environment": "environment_error",
    "timeout": "timeout",
    "no verdict": "no_verdict",
}
"""By what :class:`Answer` says of why it was cut short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Asks the weights that a cycle starts from.

    ``engine`` has ``arm`` loaded; ``seed`` is the cycle's, ``release_id`` the release that the weights belong to,
    ``time`` in Unix seconds what every record bears; ``on_answer`` is called after each answer that stands.
    """

    engine: Engine
    arm: Arm
    grading: Grading
    decoding: Sampling
    seed: int
    release_id: str
    time: float
    on_answer: Callable[[], None]

    async def ask(self, tasks: Sequence[Task], *, draw: str) -> dict[str, Evaluated]:
        """One answer to each task, by task id; an answer that a fault cut short was asked for twice.

        Args:
            tasks: with different ids.
            draw: name of the draw; another one gives other seeds.
        """

        async def keep(answer: Answer) -> None:
            del answer
            self.on_answer()

        sampling = seeded(self.decoding, f"{self.seed}\n{draw}")
        return await ask_episodes(self.engine, self.arm, tasks, sampling=sampling, grading=self.grading, keep=keep)

    def record(self, asked: Asked, evaluated: Evaluated, *, draw: str) -> Judged:
        """The episode of an answer without a fault, as its user's, and the verdict on it."""
        task = asked.task
        identifier = f"rollout-{content_hash([self.arm.sha256, self.seed, draw, task.id])[:24]}"
        calls = tuple(
            Interaction(
                id=f"{identifier}-{number}",
                episode_id=identifier,
                user_key=asked.user_key,
                split=Split.TRAIN,
                created_at=self.time,
                messages=call.messages,
                tools=task.tools,
                sampling=call.sampling,
                prompt_token_ids=call.prompt_token_ids,
                choices=(call.choice,),
                release_id=self.release_id,
                engine_replica=call.replica or self.engine.replica,
                latency_s=0.0,
                task=task,
            )
            for number, call in enumerate(evaluated.calls)
        )
        outcome, score, detail = _conclusion(evaluated)
        verdict = Verdict(
            episode_id=identifier,
            verifier=task.verifier,
            version=self.grading.verifiers[task.verifier].version,
            outcome=outcome,
            score=score,
            detail=detail,
            seconds=0.0,
            created_at=self.time,
        )
        episode = Episode(id=identifier, user_key=asked.user_key, split=Split.TRAIN, interactions=calls)
        return Judged(episode=episode, verdict=verdict)


def fault_in(evaluated: Evaluated) -> str | None:
    """Why an answer says nothing of the model or can't be trained on, None where it does and can.

    ``engine_error``, ``environment_error``, ``timeout`` and ``no_verdict`` cut it short; ``no_token_ids``: the engine
    did not give all tokens with their log-probabilities.
    """
    if evaluated.answer.cut_short:
        origin = str(evaluated.answer.error).partition(":")[0]
        return _FAULTS[origin]
    return None if all(map(_can_train, evaluated.calls)) else "no_token_ids"


def _can_train(call: Call) -> bool:
    return has_tokens(call.prompt_token_ids, call.choice) and all(map(math.isfinite, call.choice.logprobs))


def _conclusion(evaluated: Evaluated) -> tuple[Outcome, float, str]:
    """Outcome, score and detail of a verdict, by the rules that hold for traffic."""
    answer, judgement = evaluated.answer, evaluated.judgement
    if judgement is None:
        return Outcome.FAIL, 0.0, f"{VERIFIER_ERROR}: {answer.error}"
    if answer.no_reply or answer.invalid_tool_call:
        return Outcome.FAIL, 0.0, NO_REPLY if answer.no_reply else INVALID_TOOL_CALL
    return judgement.outcome, judgement.score, judgement.detail

"""A small world for rollouts: an engine whose tokens are characters, traffic in memory, and the stages of a cycle."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine
from gate_engine import make_grading
from store_samples import release
from tidegate.config import Settings
from tidegate.core.chat import flatten_messages, parse_completion
from tidegate.core.types import (
    Choice,
    ChoiceEnd,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    Interaction,
    Messages,
    Outcome,
    PromptTokens,
    Sampling,
    Split,
    Task,
    TokenDelta,
    Tools,
    Verdict,
)
from tidegate.cycle.machine import Outputs, Step, StepResult
from tidegate.cycle.stages import CycleStages
from tidegate.cycle.steps import cycle_steps
from tidegate.signals import builtin_environments, builtin_verifiers
from tidegate.stores.memory import MemoryAuditLog, MemoryReleaseStore, MemoryTrajectoryStore

UNTIL = 1000.0
END = "</>"


def prompt_text(messages: Messages, tools: Tools = ()) -> str:
    turns = (f"<{message['role']}>{message['content']}{END}" for message in flatten_messages(messages, tools))
    return "".join(turns) + "<assistant>"


def as_tokens(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def as_text(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


@dataclass
class CharacterEngine(FakeEngine):
    """Says what ``say`` makes of a request, one token a character; an exception from it is the engine's."""

    say: Callable[[GenerationRequest], str] = lambda request: "no idea"
    without_logprobs: bool = False

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        self.requests.append(request)
        prompt = as_tokens(prompt_text(request.messages, request.tools))
        yield PromptTokens(token_ids=prompt, replica=self.answers_as)
        text = self.say(request)
        parsed = parse_completion(text, call_id_seed=request.request_id)
        tokens = as_tokens(text + END)
        logprobs = () if self.without_logprobs else tuple(-0.01 * (token % 7) for token in tokens)
        yield TokenDelta(choice=0, token_ids=tokens, logprobs=logprobs, text=parsed.text, tool_calls=parsed.tool_calls)
        reason = FinishReason.TOOL_CALLS if parsed.tool_calls else FinishReason.STOP
        yield ChoiceEnd(choice=0, finish_reason=reason, invalid_tool_call=parsed.invalid)


def sum_task(number: int, **changes: Any) -> Task:
    """What is ``number`` plus one?"""
    fields: dict[str, Any] = {
        "id": f"task-{number}",
        "messages": ({"role": "user", "content": f"number {number} plus one"},),
        "verifier": "numeric_answer",
        "reference": number + 1,
        "kind": "sums",
    }
    return Task(**{**fields, **changes})


def asked(task: Task | None, *, user: str = "u", name: str = "", **changes: Any) -> Interaction:
    """A recorded call of a train user."""
    identifier = name or f"{user}-{task.id if task else 'chat'}"
    fields: dict[str, Any] = {
        "id": f"i-{identifier}",
        "episode_id": f"e-{identifier}",
        "user_key": user,
        "split": Split.TRAIN,
        "created_at": 10.0,
        "messages": task.messages if task else ({"role": "user", "content": "hello"},),
        "tools": task.tools if task else (),
        "sampling": Sampling(temperature=0.3, top_p=0.5, max_tokens=64),
        "prompt_token_ids": (1, 2),
        "choices": (Choice(index=0, token_ids=(3, 4), logprobs=(-0.1, -0.2), text="42"),),
        "release_id": "smol-r0",
        "engine_replica": "fake-0",
        "latency_s": 0.1,
        "task": task,
    }
    return Interaction(**{**fields, **changes})


def verdict_on(call: Interaction, *, passed: bool) -> Verdict:
    return Verdict(
        episode_id=call.episode_id,
        verifier=call.task.verifier if call.task else "none",
        version="1",
        outcome=Outcome.PASS if passed else Outcome.FAIL,
        score=float(passed),
        detail="",
        seconds=0.0,
        created_at=20.0,
    )


@dataclass
class RolloutWorld:
    """A cycle up to its curation over traffic in memory."""

    root: Path
    engine: CharacterEngine = field(default_factory=CharacterEngine)
    store: MemoryTrajectoryStore = field(default_factory=MemoryTrajectoryStore)
    rollouts: dict[str, Any] = field(default_factory=lambda: {"samples": 3})
    curation: dict[str, Any] = field(default_factory=lambda: {"min_fresh": 1})
    opened: int = 0
    seed: int = 5

    def record(self, call: Interaction, *, passed: bool | None = False) -> Interaction:
        self.store.append_interactions([call])
        if passed is not None:
            self.store.append_verdicts([verdict_on(call, passed=passed)])
        return call

    @property
    def config(self) -> dict[str, Any]:
        settings = self._settings()
        return {
            "proposed": None, "after": 0.0, "until": UNTIL, "seed": self.seed, "champion_sha256": None,
            "rollouts": settings.rollouts.model_dump(mode="json"),
            "curation": settings.curation.model_dump(mode="json"),
            "training": settings.training.model_dump(mode="json"),
        }  # fmt: skip

    def stages(self) -> CycleStages:
        releases = MemoryReleaseStore(MemoryAuditLog())
        releases.add_release(release())

        @asynccontextmanager
        async def open_engine() -> AsyncIterator[CharacterEngine]:
            self.opened += 1
            yield self.engine

        verifiers = builtin_verifiers()
        return CycleStages(
            settings=self._settings(),
            trajectories=self.store,
            manifests=self.store,
            sealed_episodes=lambda: (_ for _ in ()).throw(AssertionError("the sealed side was asked")),
            releases=releases,
            verifiers=verifiers,
            grading=make_grading(verifiers=verifiers, environments=builtin_environments()),
            open_engine=open_engine,
            open_gate=lambda progress: (_ for _ in ()).throw(AssertionError(progress)),
            publish=lambda candidate, against: (_ for _ in ()).throw(AssertionError((candidate, against))),
            canary=None,
            quarantined=tuple,
            save_certificate=lambda certificate: None,
            base_model=self.root,
            base_sha256=self.engine.base_sha256,
            adapters_dir=self.root / "adapters",
            batches_dir=self.root / "batches",
            rollouts_dir=self.root / "rollouts",
            clock=lambda: 2.0,
        )

    async def run(self, step: Step, outputs: Outputs | None = None, **config: Any) -> StepResult:
        return await cycle_steps(self.stages())[step]({**self.config, **config}, outputs or {}, lambda detail: None)

    def _settings(self) -> Settings:
        return Settings(rollouts=self.rollouts, curation=self.curation)  # type: ignore[arg-type]

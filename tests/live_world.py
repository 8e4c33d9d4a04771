"""The live part of the gate over real stores in memory and a real publisher; users are recorded, not served."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from live_log import live_policy
from release_world import World as ReleaseWorld
from tidegate.app.watch import LiveGate
from tidegate.app.watch_calls import CallTally
from tidegate.app.watch_units import WatchRules
from tidegate.core.gate.live_assignment import LiveArm
from tidegate.core.gate.live_state import Trial
from tidegate.core.gate.policy import Policy
from tidegate.core.gate.state import GateState, gate_state
from tidegate.core.types import (
    AuditRecord,
    Choice,
    Feedback,
    FinishReason,
    Interaction,
    Release,
    Sampling,
    Split,
    Task,
)
from tidegate.signals import builtin_verifiers
from tidegate.stores.memory import MemoryTrajectoryStore

FIRST, SECOND = "m-r1-11111111", "m-r2-22222222"
RULES = WatchRules(metric="helpful", verdict_wait_s=50.0, late_s=5.0, open_ttl_s=5.0, max_calls=3)


class Prompts:
    """Canary prompts with answers that a test sets; a prompt that is missing there is cut short."""

    def __init__(self, **right: bool) -> None:
        self.right: dict[str, bool] = dict(right)
        self.names = frozenset(right)
        self.asked: list[frozenset[str]] = []

    async def ask(self, release: Release, wanted: frozenset[str]) -> Mapping[str, bool]:
        assert release.id == SECOND
        self.asked.append(wanted)
        return {name: right for name, right in self.right.items() if name in wanted}


class LiveWorld:
    """Candidate 1 is the champion; ``policy`` asks for canary and holdback unless a test says otherwise."""

    def __init__(self, root: Path, *, policy: Policy | None = None, prompts: Prompts | None = None) -> None:
        self.policy = policy or live_policy()
        self.prompts = prompts
        self.releases = ReleaseWorld(root)
        self.open = MemoryTrajectoryStore()
        self.sealed = MemoryTrajectoryStore(role="sealed")
        self.tally = CallTally()
        self.numbers = itertools.count(1)
        self.checks: list[Callable[[], None]] = []
        self.gate = self.process()

    def process(self) -> LiveGate:
        """A live gate that remembers nothing, as a new process has it."""
        ids = itertools.count(1)
        return LiveGate(
            publisher=self.releases.publisher,
            audit=self.audit,
            releases=self.releases.store,
            stores=(self.open, self.sealed),
            verifiers=builtin_verifiers(),
            check_certificate=self.releases.check,
            policy=self.policy,
            rules=RULES,
            prompts=self.prompts,
            tally=self.tally,
            clock=lambda: self.releases.now,
            new_id=lambda: f"{next(ids)}-{next(self.numbers)}",
        )

    async def restart(self) -> None:
        """kill -9 and a new start: empty router and engine, nothing in memory."""
        self.releases.start()
        await self.releases.publisher.reconcile()
        self.tally.forget()
        self.gate = self.process()
        await self.gate.resume()

    @property
    def audit(self) -> Any:
        return self.releases.store._audit

    @property
    def records(self) -> list[AuditRecord]:
        return list(self.audit.read())

    @property
    def state(self) -> GateState:
        return gate_state(self.records)

    @property
    def trial(self) -> Trial:
        trial = self.state.live.trial
        assert trial is not None
        return trial

    async def first_champion(self) -> str:
        candidate = self.releases.certified("1", kind="person")
        await self.releases.publish(candidate)
        return candidate

    async def start_canary(self, letter: str = "2") -> str:
        candidate = self.releases.certified(letter)
        await self.gate.start_canary(candidate, against="1" * 64)
        return candidate

    def users_of(self, arm: LiveArm | None, count: int) -> list[str]:
        """New users of an arm of the running trial."""
        found: list[str] = []
        while len(found) < count:
            user = f"user-{next(self.numbers)}"
            if self.trial.assignment.arm_of(user) is arm:
                found.append(user)
        return found

    def served_to(self, user: str) -> str:
        episode = f"e-{next(self.numbers)}"
        release = self.releases.router.resolve("champion", episode_id=episode, user_key=user).release_id
        self.releases.router.end_episode(episode)
        return release

    def ask(self, user: str, *, right: bool | None = True, answer: str | None = None, **changes: Any) -> Interaction:
        """Record one answered call; ``right`` None declares no task, so that only feedback can judge it."""
        self.releases.now += 0.01
        number = next(self.numbers)
        messages = ({"role": "user", "content": f"question {number}"},)
        task = Task(id=f"task-{number}", messages=messages, verifier="exact_text", reference="ok")
        text = answer if answer is not None else "ok" if right else "no"
        fields: dict[str, Any] = {
            "id": f"chatcmpl-{number}",
            "episode_id": f"episode-{number}",
            "user_key": user,
            "split": Split.TRAIN,
            "created_at": self.releases.now,
            "messages": messages,
            "tools": (),
            "sampling": Sampling(),
            "prompt_token_ids": (1,),
            "choices": (Choice(index=0, token_ids=(2,), logprobs=(-1.0,), text=text, finish_reason=FinishReason.STOP),),
            "release_id": self.served_to(user),
            "engine_replica": "e",
            "latency_s": 0.1,
            "task": None if right is None else task,
        }
        call = Interaction(**{**fields, **changes})
        (self.sealed if call.split is Split.SEALED else self.open).append_interactions([call])
        return call

    def say(self, call: Interaction, value: Any, *, metric: str = "helpful", by_episode: bool = False) -> None:
        number = next(self.numbers)
        feedback = Feedback(
            id=f"fb-{number}",
            metric_name=metric,
            value=value,
            interaction_id=None if by_episode else call.id,
            episode_id=call.episode_id if by_episode else None,
            tags={},
            created_at=self.releases.now,
        )
        (self.sealed if call.split is Split.SEALED else self.open).append_feedback(feedback)

    def arms(self, subject: Sequence[bool], control: Sequence[bool], **changes: Any) -> None:
        """New users of both arms ask once each, in turn."""
        users = (self.users_of(LiveArm.SUBJECT, len(subject)), self.users_of(LiveArm.CONTROL, len(control)))
        for arm, outcomes in zip(users, (subject, control), strict=True):
            for user, right in zip(arm, outcomes, strict=True):
                self.ask(user, right=right, **changes)

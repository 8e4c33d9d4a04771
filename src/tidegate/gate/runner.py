"""From a candidate to a recorded decision and, when it is promoted, a certificate.

The gate keeps no state of its own: the audit log says what was decided and what is spent, the sealed store
which tasks an epoch holds and what was answered. A process that dies at any point leaves work that the next
call finds and goes on from; a decision that was recorded is returned, never taken again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidegate.core.errors import FrozenError
from tidegate.core.gate.decisions import Decision, Promote, Reply, ScreenResult, reply_of
from tidegate.core.gate.evidence import encode_pairs, paired
from tidegate.core.gate.policy import Policy
from tidegate.core.gate.records import (
    DECISION_GIVEN,
    RECORD_FORMAT,
    SCREEN_GIVEN,
    decide,
    decide_screen,
    wants_samples,
)
from tidegate.core.gate.samples import encode_samples
from tidegate.core.gate.state import (
    DECISION,
    EPOCH_CLOSED,
    EPOCH_OPENED,
    SCREEN,
    Epoch,
    GateState,
    commitment_of,
    find_decision,
    find_repeated,
    find_screen,
    fold,
    gate_state,
)
from tidegate.core.hashing import content_hash
from tidegate.core.types import Answer, AuditRecord, Candidate, Sampling, Task
from tidegate.gate.arms import Arm, check_challenger, loaded
from tidegate.gate.asking import (
    SEED_RULE,
    check_same_grading,
    decoding_from_json,
    decoding_to_json,
    sealed_sample,
    seeded,
    unique,
)
from tidegate.gate.certificates import sign_certificate
from tidegate.gate.collecting import Collector, OnProgress
from tidegate.gate.evaluate import Clock, Grading
from tidegate.gate.journal import Journal
from tidegate.gate.keys import KeyPair
from tidegate.gate.screening import screen_evidence
from tidegate.ports import AuditLog, Engine, SealedStore

_DAY_S = 86400.0
_MAX_SEEN_SHARE = 0.01  # of an epoch's tasks; one is always borne, or a chance repetition would end a small epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Screened:
    """End of a screen. The dev set is free to be seen, so the whole result may go to the proposing side."""

    result: ScreenResult
    record: AuditRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Certified:
    """End of a certification. Only ``reply`` may go to the proposing side; the rest is for operators."""

    reply: Reply
    decision: Decision
    record: AuditRecord
    certificate: Mapping[str, Any] | None


class Gate:
    """The only way from trained weights to a gate certificate."""

    def __init__(
        self,
        *,
        policy: Policy,
        audit: AuditLog,
        sealed: SealedStore,
        engine: Engine,
        key: KeyPair,
        grading: Grading,
        clock: Clock,
        on_progress: OnProgress = lambda arm, done, wanted: None,
    ) -> None:
        """Wire the gate.

        Args:
            policy: thresholds; its values and hash go into every record.
            audit: where decisions are written and read back from.
            sealed: epochs and the answers given to them.
            engine: evaluates; adapters that it lacks are loaded and unloaded around an evaluation.
            key: signs gate certificates.
            grading: verifiers, environments and limits of an evaluation.
            clock: Unix seconds, for records.
            on_progress: told about answers as they come, but not about those that only a challenger is asked for
                which passed everything else: who proposes may listen.
        """
        self._policy = policy
        self._journal = Journal(audit, clock)
        self._sealed = sealed
        self._engine = engine
        self._key = key
        self._grading = grading
        self._clock = clock
        self._collector = Collector(engine, sealed, grading, on_progress)
        self._turn = asyncio.Lock()  # two looks at once could take the same number

    async def screen_candidate(
        self,
        candidate: Candidate,
        *,
        challenger: Arm,
        champion: Arm,
        dev: Sequence[Task],
        decoding: Sampling,
        anchor: Arm,
        canary_prompts: Sequence[Task] = (),
    ) -> Screened:
        """Take the free look at the dev set and record it.

        Args:
            candidate: what is proposed.
            challenger: its adapter.
            champion: what serves now.
            dev: tasks of dev users; duplicates by id are asked once. Where they are fewer than the policy asks for,
                tasks of closed epochs fill them up.
            decoding: the traffic's sampling settings; ``n`` and ``seed`` are set here.
            canary_prompts: tasks that must be passed, asked greedily.
            anchor: the last release that a person signed: the reference of the divergence, which is measured where the
                policy has a budget for it.

        Raises:
            GateError: the arms do not fit the candidate or the engine, or the probe failed.
            EngineError: an adapter can't be loaded.
        """
        async with self._turn:
            check_challenger(candidate, challenger, self._engine)
            records = await self._journal.records()
            missing = self._policy.screen.min_dev_pairs - len(unique(dev))
            dev = unique([*dev, *await self._released(gate_state(records), missing)])
            canary_prompts = unique(canary_prompts)
            tasks = [*dev, *canary_prompts]
            self._grading.check(tasks)
            given: dict[str, Any] = {
                **self._given(candidate, champion, tasks),
                "decoding": decoding_to_json(decoding),
                "seeds": {"seed": content_hash([task.id for task in tasks]), "rule": SEED_RULE},
            }
            reference = None if self._policy.screen.kl_budget is None else anchor
            earlier = find_screen(records, given, reference_sha256=reference and reference.sha256)
            if earlier is not None:
                result, _ = decide_screen({name: earlier.body[name] for name in SCREEN_GIVEN})
                return Screened(result=result, record=earlier)
            given |= await screen_evidence(
                self._engine,
                self._collector,
                given,
                challenger=challenger,
                champion=champion,
                reference=reference,
                dev=dev,
                canary_prompts=canary_prompts,
            )
            result, body = decide_screen(given)
            return Screened(result=result, record=await self._journal.append(SCREEN, body))

    async def certify_candidate(
        self,
        candidate: Candidate,
        *,
        challenger: Arm,
        champion: Arm,
        anchor: Arm,
        tasks: Sequence[tuple[str, Task]],
        asked_in_the_open: Callable[[Task], bool],
        decoding: Sampling,
    ) -> Certified:
        """Look at a sealed set and decide.

        The open epoch is used while it lasts and hardly any of its tasks was asked in the open; otherwise a new one is
        opened from the tasks that no epoch held before, one a user. With too few of them the gate abstains and no look
        is spent. A look that was taken at this adapter against the same champion and anchor under this policy stands
        and is returned.

        Args:
            candidate: what is proposed.
            challenger: its adapter.
            champion: what serves now.
            anchor: the last release that a person signed.
            tasks: (user key, replayable task) of the sealed users' traffic.
            asked_in_the_open: whether users whose traffic trains or is seen asked a task too, or almost the same; its
                answer may have been learnt by heart.
            decoding: the traffic's sampling settings; fixed for an epoch when it opens.

        Raises:
            FrozenError: learning is frozen, the policy is looser than the one in force, or people have invalidated a
                verifier that a new epoch needs.
            GateError: the arms do not fit the candidate or the engine, a task can't be graded, the open epoch
                began with another grading, or another process decided meanwhile.
            EngineError: an adapter can't be loaded.
        """
        async with self._turn:
            check_challenger(candidate, challenger, self._engine)
            records = await self._journal.records()
            earlier = find_decision(
                records,
                candidate_sha256=challenger.sha256,
                champion_sha256=champion.sha256,
                anchor_sha256=anchor.sha256,
                policy_hash=self._policy.hash,
            )
            if earlier is not None:
                before = gate_state(record for record in records if record.seq < earlier.seq)
                decision, _ = decide({name: earlier.body[name] for name in DECISION_GIVEN}, before)
                return self._certified(candidate, decision, earlier)
            state = gate_state(records)
            hindrance = state.why_not_decide(self._policy)
            if hindrance is not None:
                raise FrozenError(hindrance)
            state, epoch, available = await self._epoch(state, tasks, asked_in_the_open, decoding)
            arms = {"challenger": challenger, "champion": champion, "anchor": anchor}
            given = await self._sealed_evidence(candidate, arms, epoch, available)
            given["samples"] = await self._samples(given, state, arms)
            decision, body = decide(given, state)
            record = find_repeated(records, body) or await self._journal.append_after(state, DECISION, body)
            return self._certified(candidate, decision, record)

    async def _sealed_evidence(
        self, candidate: Candidate, arms: Mapping[str, Arm], epoch: Epoch | None, available: int
    ) -> dict[str, Any]:
        """Ask the epoch's tasks and write down all that the decision is taken from."""
        tasks: tuple[Task, ...] = ()
        answers: dict[str, dict[str, Answer]] = {name: {} for name in arms}
        if epoch is not None:
            tasks = await asyncio.to_thread(self._sealed.epoch_tasks, epoch.id)
            self._grading.check(tasks)
            check_same_grading(epoch, self._grading, tasks)
            sampling = seeded(decoding_from_json(epoch.decoding), epoch.commitment)
            async with loaded(self._engine, *arms.values()):
                for name, arm in arms.items():
                    answers[name] = await self._collector.answers(name, arm, tasks, sampling, epoch_id=epoch.id)
        return {
            **self._given(candidate, arms["champion"], tasks),
            "anchor_sha256": arms["anchor"].sha256,
            "salt": self._salt(epoch.id) if epoch else None,
            "seeds": {"seed": epoch.commitment if epoch else None, "rule": SEED_RULE},
            "available": available,
            "outcomes": encode_pairs(paired(tasks, **answers, graded=self._grading.graded(tasks))),
            "samples": None,
        }

    async def _samples(self, given: Mapping[str, Any], state: GateState, arms: Mapping[str, Arm]) -> Any:
        """Further answers for the collapse tests; None while something else stands against the challenger anyway."""
        epoch, rules = state.open_epoch(self._policy), self._policy.collapse
        if epoch is None or rules == "none" or not wants_samples(given, state):
            return None
        tasks = await asyncio.to_thread(self._sealed.epoch_tasks, epoch.id)
        challenger, anchor = arms["challenger"], arms["anchor"]
        async with loaded(self._engine, challenger, anchor):
            return encode_samples(await self._collector.samples(challenger, anchor, tasks, epoch, rules))

    async def _epoch(
        self,
        state: GateState,
        offered: Sequence[tuple[str, Task]],
        asked_in_the_open: Callable[[Task], bool],
        decoding: Sampling,
    ) -> tuple[GateState, Epoch | None, int]:
        """The state to decide in, and the epoch to look at with its size, or None and how many tasks there are."""
        state = await self._without_seen(await self._without_expired(state), asked_in_the_open)
        current = state.open_epoch(self._policy)
        if current is not None:
            return state, current, current.size
        number = len(state.epochs) + 1
        epoch_id = f"epoch-{number}"
        salt = self._salt(epoch_id)
        tasks = await asyncio.to_thread(self._sealed.epoch_tasks, epoch_id)
        if not tasks:  # some already: a process died between the two writes below
            used = await asyncio.to_thread(self._sealed.used_task_ids)
            tasks = sealed_sample(offered, used=used, salt=salt, limit=self._policy.sealed.max_pairs)
            if len(tasks) < self._policy.sealed.min_pairs:
                return state, None, len(tasks)
            self._grading.check(tasks)
            self._refuse_disbelieved(state, tasks)
            commitment = commitment_of((task.id for task in tasks), salt)
            await asyncio.to_thread(self._sealed.open_epoch, epoch_id, tasks, commitment, self._clock())
        body: dict[str, Any] = {
            "epoch": epoch_id,
            "number": number,
            "commitment": commitment_of((task.id for task in tasks), salt),
            "size": len(tasks),
            "decoding": decoding_to_json(decoding),
            "grading": self._grading.fingerprint(tasks),
            "policy_hash": self._policy.hash,
        }
        opened = fold(state, await self._journal.append_after(state, EPOCH_OPENED, body))
        # Tasks that a process left when it died may have been asked in the open since.
        state = await self._without_seen(opened, asked_in_the_open)
        return state, state.open_epoch(self._policy), len(tasks) if state is opened else 0

    def _refuse_disbelieved(self, state: GateState, tasks: Sequence[Task]) -> None:
        """No set is opened whose answers would be scored by what people have invalidated; open ones are closed then."""
        disbelieved = state.controls.disbelieved(self._grading.fingerprint(tasks)["verifiers"])
        if disbelieved:
            raise FrozenError(
                f"sealed tasks are scored by {', '.join(disbelieved)}, which people have invalidated: nothing is "
                "judged by it. Install another version, or leave those tasks out of the traffic"
            )

    async def _without_expired(self, state: GateState) -> GateState:
        """Close the open epoch if it is older than the policy allows."""
        current = state.open_epoch(self._policy)
        age_s = 0.0 if current is None else self._clock() - current.opened_at
        if current is None or age_s <= self._policy.sealed.max_age_days * _DAY_S:
            return state
        body = {"epoch": current.id, "reason": f"expired after {age_s / _DAY_S:.1f} days"}
        return fold(state, await self._journal.append_after(state, EPOCH_CLOSED, body))

    async def _without_seen(self, state: GateState, asked_in_the_open: Callable[[Task], bool]) -> GateState:
        """Close the open epoch if more than a few of its tasks were asked in the open since it opened."""
        current = state.open_epoch(self._policy)
        if current is None:
            return state
        tasks = await asyncio.to_thread(self._sealed.epoch_tasks, current.id)
        seen = await asyncio.to_thread(lambda: sum(map(asked_in_the_open, tasks)))
        if seen <= max(1, math.floor(_MAX_SEEN_SHARE * len(tasks))):
            return state
        body = {"epoch": current.id, "reason": f"{seen} of {len(tasks)} tasks were asked by train or dev users too"}
        return fold(state, await self._journal.append_after(state, EPOCH_CLOSED, body))

    async def _released(self, state: GateState, wanted: int) -> list[Task]:
        """Up to ``wanted`` tasks of closed epochs, latest epoch first: nobody will be judged by them any more."""
        tasks: list[Task] = []
        for epoch in reversed([epoch for epoch in state.epochs if epoch.closed is not None]):
            if len(tasks) >= wanted:
                break
            tasks += await asyncio.to_thread(self._sealed.epoch_tasks, epoch.id)
        return tasks[: max(wanted, 0)]

    def _given(self, candidate: Candidate, champion: Arm, tasks: Sequence[Task]) -> dict[str, Any]:
        names = sorted({task.verifier for task in tasks})
        return {
            "format": RECORD_FORMAT,
            "candidate": candidate.id,
            "candidate_sha256": candidate.adapter_sha256,
            "champion_sha256": champion.sha256,
            "base_sha256": candidate.base_sha256,
            "manifest_hash": candidate.manifest_hash,
            "policy": self._policy.values(),
            "verifiers": {name: self._grading.verifiers[name].version for name in names},
            "signer": self._key.public_hex,
        }

    def _certified(self, candidate: Candidate, decision: Decision, record: AuditRecord) -> Certified:
        """A promotion's certificate follows from its record alone, so that it can be issued again."""
        certificate = None
        if isinstance(decision, Promote):
            certificate = sign_certificate(
                self._key,
                kind="gate",
                adapter_sha256=candidate.adapter_sha256,
                base_sha256=candidate.base_sha256,
                policy_hash=record.body["policy_hash"],
                decision_hash=record.hash,
                issued_at=record.time,
            )
        return Certified(reply=reply_of(decision), decision=decision, record=record, certificate=certificate)

    def _salt(self, epoch_id: str) -> str:
        return self._key.secret_for(f"salt of {epoch_id}")

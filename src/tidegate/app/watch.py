"""The live part of the gate beside serving: starts trials, looks at them, and carries out what was decided.

Each look is one audit record, written before anything acts on it and only to the state that it was taken in. A
process that dies in between finds the decision in the log and carries it out, once. Missing data never promotes:
a look that fails concludes nothing, is logged and counted, and is taken again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from tidegate.app.watch_acts import GateLog, ServesReleases, carry_out
from tidegate.app.watch_calls import CallTally
from tidegate.app.watch_certificates import fallen_certificates
from tidegate.app.watch_units import UnitReader, WatchRules, rate_before
from tidegate.core.errors import CertificateError, ConflictError, TidegateError, VoidCertificateError
from tidegate.core.gate.live_records import (
    is_silent,
    look_at_canary,
    look_at_steady,
    look_given,
    started_body,
    steady_policy,
    trial_status,
)
from tidegate.core.gate.live_state import CANARY_LOOK, CANARY_STARTED, STEADY_LOOK, STEADY_STARTED, Calls, Trial
from tidegate.core.gate.policy import Policy
from tidegate.core.gate.state import GateState
from tidegate.core.types import Candidate, CandidateState, JsonObject, Release
from tidegate.ports import AuditLog, ReleaseStore, TrajectoryStore, Verifier
from tidegate.release import CANARY, CHAMPION, PREVIOUS, CertificateCheck, Division

_log = logging.getLogger(__name__)


class AsksPrompts(Protocol):
    """Asks canary prompts greedily."""

    @property
    def names(self) -> frozenset[str]:
        """All of them."""
        ...

    async def ask(self, release: Release, wanted: frozenset[str]) -> Mapping[str, bool]:
        """Whether each was answered rightly; one that was cut short is left out."""
        ...


class LiveGate:
    """Trials of one data directory; one process at a time looks at them.

    Args:
        publisher: acts.
        audit: remembers.
        releases: candidates by content.
        stores: trajectories of open and of sealed users.
        verifiers: by name.
        check_certificate: whether a release's certificate still stands.
        policy: rules of trials that start from now on.
        rules: limits of what is read.
        prompts: canary prompts, None when there are none.
        tally: calls of this process.
        clock: Unix seconds.
        new_id: unique letters and digits.
    """

    def __init__(
        self,
        *,
        publisher: ServesReleases,
        audit: AuditLog,
        releases: ReleaseStore,
        stores: tuple[TrajectoryStore, TrajectoryStore],
        verifiers: Mapping[str, Verifier],
        check_certificate: CertificateCheck,
        policy: Policy,
        rules: WatchRules,
        prompts: AsksPrompts | None,
        tally: CallTally,
        clock: Callable[[], float],
        new_id: Callable[[], str],
    ) -> None:
        self._publisher = publisher
        self._log = GateLog(audit, clock)
        self._releases = releases
        self._stores = stores
        self._verifiers = verifiers
        self._check_certificate = check_certificate
        self._policy = policy
        self._rules = rules
        self._prompts = prompts
        self._tally = tally
        self._clock = clock
        self._new_id = new_id
        self._reader: UnitReader | None = None
        self._untold: Counter[str] = Counter()  # exclusions of looks that said nothing else
        self._one_at_a_time = asyncio.Lock()

    async def start_canary(self, candidate_id: str, *, against: str) -> JsonObject:
        """Put a certified candidate before a share of the users; repeating it after a crash changes nothing.

        Args:
            candidate_id: which one.
            against: content hash of the adapter that it was judged against, or ``base``.

        Returns:
            The status of its trial.

        Raises:
            ConflictError: the policy has no canary, is not in force, learning is frozen, or as the publisher says.
        """
        async with self._one_at_a_time:
            state = await self._settled_state()
            running = state.live.running
            if running is not None and running.kind == "canary" and running.candidate == candidate_id:
                return trial_status(running)
            if self._policy.canary == "none":
                raise ConflictError(
                    f"candidate {candidate_id!r} can be no canary: policy {self._policy.name!r} says canary = 'none'"
                )
            why_not = state.why_not_decide(self._policy)
            if why_not is not None:
                raise ConflictError(f"candidate {candidate_id!r} can be no canary: {why_not}")
            release = await self._publisher.start_canary(candidate_id, against=against)
            if running is not None:
                await self._look(running, interruption=f"the canary {release.id!r} starts")
                await self._carry_out()
            served = await self._publisher.served()
            await self._start("canary", self._policy, subject=release, control=served[CHAMPION])
            return trial_status(self._running())

    async def stop(self, reason: str) -> JsonObject:
        """End the canary that runs, inconclusively: its candidate is rejected.

        Raises:
            ConflictError: none runs.
        """
        async with self._one_at_a_time:
            running = (await self._settled_state()).live.running
            if running is None or running.kind != "canary":
                raise ConflictError("no canary runs; 'tidegate canary status' shows the last one")
            await self._look(running, interruption=f"stopped: {reason}")
            await self._carry_out()
            return trial_status(self._last())

    async def step(self) -> None:
        """Carry out what waits, then look once at the trial that runs, or start the one that should."""
        async with self._one_at_a_time:
            running = (await self._settled_state()).live.running
            fallen = await self._fallen()
            if running is None:
                if CHAMPION in fallen:
                    raise fallen[CHAMPION]
                await self._start_steady()
                return
            served = await self._publisher.served()
            interruption = _interruption(running, served) or _fallen_arm(served, fallen)
            if interruption is None:
                await self._divide(running)
            await self._look(running, interruption=interruption)
            await self._carry_out()

    async def resume(self) -> None:
        """After a start: carry out what waits, and give a trial that runs its users back."""
        async with self._one_at_a_time:
            running = (await self._settled_state()).live.running
            if running is not None and _interruption(running, await self._publisher.served()) is None:
                await self._divide(running)

    def status(self) -> JsonObject:
        """The trial that runs as it was looked at last, under ``canary`` or ``holdback``; the other one is None."""
        running = self._log.state.live.running
        shown = None if running is None else trial_status(running)
        return {
            "canary": shown if running is not None and running.kind == "canary" else None,
            "holdback": shown if running is not None and running.kind == "steady" else None,
        }

    async def _settled_state(self) -> GateState:
        """The state after everything that was decided before is done."""
        await asyncio.to_thread(self._log.refresh)
        await self._carry_out()
        return self._log.state

    async def _fallen(self) -> dict[str, CertificateError]:
        """Why what is served may be served no longer, by alias; what was replaced or forgotten is not among them."""
        served = await self._publisher.served()
        fallen = await asyncio.to_thread(fallen_certificates, self._check_certificate, served)
        void = fallen.get(CHAMPION)
        if isinstance(void, VoidCertificateError):
            _log.warning("%s is not served any more: %s", served[CHAMPION].id, void)
            await self._publisher.replace_void(void)
            del fallen[CHAMPION]
        elif PREVIOUS in fallen:
            await self._publisher.forget_previous(f"its certificate does not stand: {fallen.pop(PREVIOUS)}")
        return fallen

    async def _carry_out(self) -> None:
        await carry_out(self._log, self._publisher)

    def _running(self) -> Trial:
        trial = self._log.state.live.running
        if trial is None:
            raise ConflictError("no trial runs; another process ended it: try again")
        return trial

    def _last(self) -> Trial:
        trial = self._log.state.live.trial
        assert trial is not None  # noqa: S101 - a trial that ran stays the last one
        return trial

    async def _start_steady(self) -> None:
        """Compare the champion with the release before it, unless that was taken back or nothing asks for it."""
        policy = steady_policy(self._policy, self._log.state)
        if policy.holdback == "none":
            return
        served = await self._publisher.served()
        champion, previous = served[CHAMPION], served.get(PREVIOUS)
        if previous is None or CANARY in served or previous.adapter_sha256 == champion.adapter_sha256:
            return
        before = await asyncio.to_thread(self._candidate_of, previous)
        if before is not None and before.state is not CandidateState.RETIRED:
            return
        if policy is not self._policy:
            _log.warning("policy %r is not in force; the champion is watched under %r", self._policy.name, policy.name)
        await self._start("steady", policy, subject=champion, control=previous)

    async def _start(self, kind: str, policy: Policy, *, subject: Release, control: Release) -> None:
        def write() -> None:
            now = self._clock()
            candidate = self._candidate_of(subject)
            body = started_body(
                trial=f"{kind}-{self._new_id()[:12]}",
                candidate=None if candidate is None else candidate.id,
                manifest_hash=None if candidate is None else candidate.manifest_hash,
                subject_release=subject.id,
                control_release=control.id,
                subject_sha256=subject.adapter_sha256,
                control_sha256=control.adapter_sha256,
                base_sha256=subject.base_sha256,
                policy=policy,
                reference=rate_before(
                    self._stores,
                    verifiers=self._verifiers,
                    releases=(subject.id, control.id),
                    after=now - _REFERENCE_S,
                    rules=self._rules,
                    clock=self._clock,
                ),
                time=now,
            )
            self._log.append_next(CANARY_STARTED if kind == "canary" else STEADY_STARTED, body)

        await asyncio.to_thread(write)
        self._tally.forget()
        await self._divide(self._running())

    def _candidate_of(self, release: Release) -> Candidate | None:
        if release.adapter_sha256 is None:
            return None
        matches = (c for c in self._releases.list_candidates() if c.adapter_sha256 == release.adapter_sha256)
        return next(matches, None)

    async def _divide(self, trial: Trial) -> None:
        await self._publisher.divide(Division(assignment=trial.assignment, release_id=trial.small_release))

    async def _look(self, trial: Trial, *, interruption: str | None) -> None:
        """Gather what is new, decide, and record it unless there is nothing to say."""
        now = self._clock()
        if trial.period_at(now) != trial.period:
            # Users are drawn anew: nothing of the old draw counts any more, and nothing of the new one has come yet.
            given = look_given(trial, time=now, interruption=interruption)
            await asyncio.to_thread(self._record, trial, given)
            if self._log.state.live.running is not None:
                await self._divide(self._running())
            return
        asked, still_open = await self._ask_prompts(trial, interruption)
        calls = self._due_calls(trial)

        def look() -> None:
            reader = self._reader_of(trial)
            self._reader = None  # what it settles counts only once the look is recorded
            gathered = reader.gather(trial)
            excluded = self._untold + Counter(gathered.excluded)
            given = look_given(
                trial,
                time=now,
                units=gathered.units,
                excluded=dict(sorted(excluded.items())),
                leaks=gathered.leaks,
                calls=calls,
                prompts=asked,
                open_prompts=still_open,
                interruption=interruption,
            )
            self._untold = Counter() if self._record(trial, given) else excluded
            self._reader = reader

        await asyncio.to_thread(look)
        self._tally.take(calls, subject=trial.subject_release, control=trial.control_release)
        after = self._log.state.live.running
        if after is not None and after.share != trial.share:
            await self._divide(after)

    def _record(self, trial: Trial, given: JsonObject) -> bool:
        """Take a look; whether it said something and was written down."""
        take = look_at_canary if trial.kind == "canary" else look_at_steady
        _, body = take(given, self._log.refresh())
        if is_silent(trial, body):
            return False
        self._log.append(CANARY_LOOK if trial.kind == "canary" else STEADY_LOOK, body)
        return True

    def _reader_of(self, trial: Trial) -> UnitReader:
        reader = self._reader
        if reader is not None and reader.draw == trial.draw:
            return reader
        self._untold = Counter()  # a new reader finds those of its draw again, and none of another draw
        return UnitReader(
            trial, stores=self._stores, verifiers=self._verifiers, rules=self._rules, clock=self._clock
        )  # fmt: skip

    def _due_calls(self, trial: Trial) -> Calls:
        """Calls that are recorded now. When is fixed by their number alone, never by the errors among them."""
        new = self._tally.new(subject=trial.subject_release, control=trial.control_release)
        known = trial.calls.subject + trial.calls.control
        enough = max(trial.policy.triggers.min_calls, known // 20)
        return new if new.subject + new.control >= enough else Calls()

    async def _ask_prompts(self, trial: Trial, interruption: str | None) -> tuple[Mapping[str, bool], int]:
        """New answers to canary prompts, and how many prompts have none yet."""
        if self._prompts is None or trial.kind != "canary" or interruption is not None:
            return {}, 0
        wanted = self._prompts.names - trial.prompts_right
        if not wanted:
            return {}, 0
        release = (await self._publisher.served()).get(CANARY)
        if release is None or release.id != trial.subject_release:
            return {}, len(wanted)
        answers = await self._prompts.ask(release, wanted)
        return answers, len(wanted - set(answers))


def _fallen_arm(served: Mapping[str, Release], fallen: Mapping[str, CertificateError]) -> str | None:
    """Why an arm of a trial may be served no longer: what it was certified by is not believed any more."""
    for alias in (CHAMPION, CANARY):
        if alias in fallen:
            return f"the certificate of {served[alias].id!r} does not stand: {fallen[alias]}"
    return None


def _interruption(trial: Trial, served: Mapping[str, Release]) -> str | None:
    """Why a trial can't go on: it compares releases that are not those served any more."""
    champion = trial.control_release if trial.kind == "canary" else trial.subject_release
    if served[CHAMPION].id != champion:
        return f"the champion changed from {champion!r} to {served[CHAMPION].id!r}"
    other, alias = trial.small_release, CANARY if trial.kind == "canary" else PREVIOUS
    if alias not in served or served[alias].id != other:
        return f"{other!r} is the {alias} no longer"
    return None


_REFERENCE_S = 7 * 86400.0
"""How far back the rate before a trial is taken from: a week holds every day of the week once."""


async def watch(step: Callable[[], Awaitable[None]], *, interval_s: float, count: Callable[[str], Any]) -> None:
    """Step for ever. A step that fails is logged, counted, and taken again after the next interval.

    Args:
        step: looks once.
        interval_s: seconds between two steps.
        count: takes the outcome of each step, ``done`` or an error's code.
    """
    while True:
        count(await one_step(step))
        await asyncio.sleep(interval_s)


async def one_step(step: Callable[[], Awaitable[None]]) -> str:
    """Take a step; returns ``done``, or the code of the error that it ended with, which is logged."""
    try:
        await step()
    except TidegateError as error:
        _log.warning("a look at live traffic failed and is taken again: %s", error)
        return error.code
    except Exception:  # noqa: BLE001 - the boundary: a fault of the watch must never end serving
        _log.exception("a look at live traffic failed unexpectedly and is taken again")
        return TidegateError.code
    return "done"

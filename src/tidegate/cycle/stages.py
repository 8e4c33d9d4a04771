"""What the steps of a cycle work with, and the questions that several of them ask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from tidegate.config import Settings
from tidegate.core.gate.live_state import Trial
from tidegate.core.types import AdapterRef, Candidate, CandidateState, Episode, JsonObject, Sampling
from tidegate.cycle.machine import Outputs, Report, Step
from tidegate.gate import Arm, Gate, Grading
from tidegate.ports import Engine, ReleaseStore, TrajectoryStore, Verifier
from tidegate.release.records import release_behind


class ManifestStore(Protocol):
    """Where the manifests of batches are kept beside the interactions that they name."""

    def add_manifest(self, manifest_hash: str, body: JsonObject, *, time: float) -> bool: ...

    def get_manifest(self, manifest_hash: str) -> JsonObject | None: ...


class CanaryStage(Protocol):
    """The canary that the policy asks for."""

    def start(self, candidate_id: str, against: str, /) -> Awaitable[JsonObject]:
        """Put a certified candidate before a share of the users; again is a no-op."""
        ...

    def trial(self, candidate_id: str) -> Trial | None:
        """Its canary as the log has it, None before it started."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleStages:
    """Everything that the steps work with. Only :func:`certify` asks for ``sealed_episodes``.

    ``publish`` takes the candidate's id and the adapter hash that it was judged against (``base`` for the bare base).
    ``open_engine`` gives the engine that answers rollouts, ``grading`` how they are run and scored.
    ``base_model`` is None where the weights are an upstream's that takes no adapters: such a cycle never trains.
    ``canary`` is None when the policy asks for none. ``quarantined`` gives hashes of batches that trained what was
    rolled back.
    """

    settings: Settings
    trajectories: TrajectoryStore
    manifests: ManifestStore
    sealed_episodes: Callable[[], list[Episode]]
    releases: ReleaseStore
    verifiers: Mapping[str, Verifier]
    grading: Grading
    open_engine: Callable[[], AbstractAsyncContextManager[Engine]]
    open_gate: Callable[[Callable[[str, int, int], None]], AbstractAsyncContextManager[Gate]]
    publish: Callable[[str, str], Awaitable[JsonObject]]
    canary: CanaryStage | None
    quarantined: Callable[[], Collection[str]]
    save_certificate: Callable[[JsonObject], None]
    base_model: Path | None
    base_sha256: str
    adapters_dir: Path
    batches_dir: Path
    rollouts_dir: Path
    clock: Callable[[], float]


def candidate_of(stages: CycleStages, outputs: Outputs) -> Candidate:
    """The candidate that the cycle trained or took in."""
    wanted = outputs[Step.TRAIN]["candidate"]
    return next(candidate for candidate in stages.releases.list_candidates() if candidate.id == wanted)


def served_content(stages: CycleStages, alias: str) -> str | None:
    """Adapter hash behind an alias; a deployment without an anchor is held to release 0."""
    return release_behind(stages.releases, alias).adapter_sha256


def move(stages: CycleStages, candidate: Candidate, state: CandidateState, reasons: Sequence[str]) -> None:
    stages.releases.set_candidate_state(candidate.id, state, reasons=tuple(reasons), time=stages.clock())


def arm_of(stages: CycleStages, sha256: str | None) -> Arm:
    """An adapter of the data directory as something that answers; None is the bare base model."""
    if sha256 is None:
        return Arm.of(None, base_sha256=stages.base_sha256)
    adapter = AdapterRef(name=f"cand-{sha256[:8]}", path=stages.adapters_dir / sha256, sha256=sha256)
    return Arm.of(adapter, base_sha256=stages.base_sha256)


def traffic_decoding(episodes: Sequence[Episode]) -> Sampling:
    """The sampling that most main-line calls of the traffic used; seeds, ``n``, searches and forms left out."""
    left_out: dict[str, Any] = {
        "seed": None, "n": 1, "top_logprobs": 0, "json_schema": None, "tool_choice": None, "distribution_known": True,
        "search": None,
    }  # fmt: skip
    settings = Counter(
        replace(call.sampling, **left_out) for episode in episodes for call in episode.interactions if call.main_line
    )
    return settings.most_common(1)[0][0] if settings else Sampling()


def progress_of(report: Report) -> Callable[[str, int, int], None]:
    """What tells ``report`` of an arm's answers."""
    return lambda arm, done, wanted: report({"arm": arm, "done": done, "of": wanted})


def short(sha256: str | None) -> str:
    return sha256[:8] if sha256 else "the base model"

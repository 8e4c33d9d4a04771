"""What is compared: adapters by content, and the proof that an engine answers with just these."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tidegate.core.errors import GateError
from tidegate.core.types import AdapterRef, Candidate, Task
from tidegate.ports import Engine

_PROBED_TASKS = 4  # one prompt may happen to be indifferent to the adapter, four hardly


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """What answers: an adapter, or the bare base model when ``adapter`` is None.

    ``sha256`` is the adapter's content hash, or the base model's.
    """

    adapter: AdapterRef | None
    sha256: str

    @classmethod
    def of(cls, adapter: AdapterRef | None, *, base_sha256: str) -> Arm:
        """The arm of an adapter over a base, or of the base alone."""
        return cls(adapter=adapter, sha256=base_sha256 if adapter is None else adapter.sha256)

    @property
    def name(self) -> str | None:
        """Name that the engine knows it by."""
        return None if self.adapter is None else self.adapter.name


def check_challenger(candidate: Candidate, challenger: Arm, engine: Engine) -> None:
    """Refuse to evaluate anything but the candidate's own adapter over the candidate's own base.

    Raises:
        GateError: a hash differs.
    """
    if challenger.adapter is None or challenger.sha256 != candidate.adapter_sha256:
        raise GateError(
            f"candidate {candidate.id!r} is adapter {candidate.adapter_sha256!r}; the challenger offered for it is "
            f"{challenger.sha256!r}"
        )
    if candidate.base_sha256 != engine.base_sha256:
        raise GateError(
            f"candidate {candidate.id!r} was trained over base {candidate.base_sha256!r}; engine {engine.replica!r} "
            f"serves {engine.base_sha256!r}: serve that base, or train again"
        )


@asynccontextmanager
async def loaded(engine: Engine, *arms: Arm) -> AsyncGenerator[None]:
    """Load the adapters that the engine lacks, and have it forget those again afterwards.

    Raises:
        GateError: the engine holds other content under an arm's name.
        EngineError: an adapter can't be loaded.
    """
    ours: list[str] = []
    try:
        for arm in arms:
            if arm.adapter is None:
                continue
            present: Mapping[str, AdapterRef] = {adapter.name: adapter for adapter in await engine.list_adapters()}
            known = present.get(arm.adapter.name)
            if known is None:
                await engine.load(arm.adapter)
                ours.append(arm.adapter.name)
            elif known.sha256 != arm.sha256:
                raise GateError(
                    f"the engine holds {known.sha256!r} under the name {known.name!r}; {arm.sha256!r} is to be judged"
                )
        yield
    finally:
        for name in ours:
            await engine.unload(name)


async def logit_difference(engine: Engine, challenger: Arm, champion: Arm, tasks: Sequence[Task]) -> float | None:
    """How far the challenger's next-token logits lie from the champion's; None without any prompt to compare on.

    Raises:
        GateError: the bytes that were loaded are not the challenger's, or the logits are not finite.
    """
    prompts = [task.messages for task in tasks[:_PROBED_TASKS]]
    if challenger.name is None or not prompts:
        return None
    probe = await engine.probe(challenger.name, against=champion.name, prompts=prompts)
    if probe.sha256 != challenger.sha256 or not math.isfinite(probe.max_logit_difference):
        raise GateError(
            f"the engine holds {probe.sha256!r} under the name {challenger.name!r} with a logit difference of "
            f"{probe.max_logit_difference!r}; {challenger.sha256!r} and a finite number are expected"
        )
    return probe.max_logit_difference

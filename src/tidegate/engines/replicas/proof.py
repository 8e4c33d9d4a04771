"""What a member must show of an adapter before it answers with it: bytes, a difference, and the trainer's numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.artifacts import adapter_manifest
from tidegate.core.agreement import AgreementRecord, ScoredSequence, Tolerance, compare, record_in
from tidegate.core.types import AdapterRef, Messages
from tidegate.ports import Engine, ProbeResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """A probe's result and what speaks against the member that gave it, None where all is as it should be."""

    result: ProbeResult
    fault: str | None


async def prove(
    engine: Engine,
    ref: AdapterRef,
    record: AgreementRecord | None,
    *,
    against: str | None,
    prompts: Sequence[Messages],
    tolerance: Tolerance,
) -> Proof:
    """Probe an adapter on one member and hold that to the trainer's record.

    Raises:
        TidegateError: it could not be asked; see :class:`tidegate.ports.Engine`.
    """
    result = await engine.probe(ref.name, against=against, prompts=prompts)
    fault = fault_in(result, ref)
    if fault is None and record is not None:

        async def ask(sequence: ScoredSequence) -> Sequence[float]:
            return await engine.sequence_logprobs(ref.name, sequence.token_ids, first=sequence.first)

        _, objection = await compare(record, ask, tolerance=tolerance)
        fault = None if objection is None else f"of {ref.name!r} {objection}"
    return Proof(result=result, fault=fault)


async def record_of(ref: AdapterRef) -> AgreementRecord | None:
    """What the trainer took down with an adapter; None where it did not, or the files are out of reach here.

    Raises:
        AdapterError: what stands there is no record.
    """
    return await asyncio.to_thread(_read, ref)


def _read(ref: AdapterRef) -> AgreementRecord | None:
    return record_in(adapter_manifest(ref.path), adapter=ref.name) if ref.path.is_dir() else None


def fault_in(found: ProbeResult, ref: AdapterRef) -> str | None:
    """What a probe says against the member that answered it, None where it is as it should be."""
    if found.sha256 != ref.sha256:
        return f"it holds {found.sha256[:12]} under {ref.name!r}, not {ref.sha256[:12]}"
    if not found.max_logit_difference > 0.0:
        return f"it lists {ref.name!r} and answers as if it were not loaded"
    return None

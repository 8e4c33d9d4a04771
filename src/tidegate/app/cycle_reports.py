"""One cycle in figures: why it ended, what it curated, how it trained, how broad each release was beside the anchor.

Made from the outputs that the cycle's steps recorded, and from nothing else: what they don't hold, as anything sealed,
can't appear here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tidegate.app.operations import existing, iso_time
from tidegate.app.stores import open_stores
from tidegate.config import Settings
from tidegate.core.errors import NotFoundError
from tidegate.core.types import JsonObject
from tidegate.cycle.machine import CycleOutcome, Step

_TOLERANCE = 1e-6  # between a configured hyperparameter and one measured in single precision
_ERROR = "_error"
_CURATED = ("manifest_hash", "examples", "fresh", "by_kind", "by_source", "with_logprobs", "earlier", "counts")
_PROPOSED = ("adapter_sha256", "trained_sha256", "averaging")
_TRAINED = (
    "steps",
    "examples",
    "sequences",
    "dropped",
    "tokens",
    "tokens_computed",
    "tokens_trained",
    "trainable_parameters",
    "memory_bound",
    "resumed_at",
    "seconds",
)


def cycle_report(settings: Settings, cycle_id: str | None) -> JsonObject:
    """The report of a cycle, of the last one opened when ``cycle_id`` is None.

    Raises:
        NotFoundError: there is no such cycle, or none at all.
    """
    with open_stores(existing(settings)) as stores:
        cycles = stores.cycles.list_cycles()
        found = [cycle for cycle in cycles if cycle_id in (None, cycle["id"])]
        if not cycles:
            raise NotFoundError("no cycle was ever opened on this data directory; start one with 'tidegate cycle run'")
        if not found:
            raise NotFoundError(f"cycle {cycle_id!r} does not exist; known: {[cycle['id'] for cycle in cycles]}")
        return report_of(found[-1], stores.cycles.steps(found[-1]["id"]))


def report_of(cycle: JsonObject, records: Mapping[str, JsonObject]) -> dict[str, Any]:
    """The report of a cycle's row and the records of its steps.

    Returns:
        ``{cycle, opened_at, closed_at, outcome, reasons, steps, curation, training, monitors}``; the last three are
        None where the step did not run, or judged an adapter that was given.
    """
    outputs = {step: record["output"] for step, record in records.items() if "output" in record}
    collected = outputs.get(Step.COLLECT.value, {})
    return {
        "cycle": cycle["id"],
        "opened_at": iso_time(cycle["opened_at"]),
        "closed_at": iso_time(cycle["closed_at"]) if cycle["closed_at"] else None,
        "outcome": cycle["outcome"] or "open",
        "reasons": _reasons(cycle, records),
        "steps": [_step(name, record) for name, record in records.items()],
        "curation": _chosen(outputs.get(Step.CURATE.value, {}), _CURATED),
        "training": _training(outputs.get(Step.TRAIN.value, {})),
        "monitors": collected.get("monitors"),
    }


def _reasons(cycle: JsonObject, records: Mapping[str, JsonObject]) -> list[str]:
    ends = [record for record in records.values() if record.get("ends")]
    errors = [str(record["error"]) for name, record in records.items() if name.endswith(_ERROR)]
    if errors or ends:
        return errors or [str(reason) for reason in ends[-1]["reasons"]]
    return ["it was abandoned"] if cycle["outcome"] == CycleOutcome.FAILED.value else []


def _step(name: str, record: JsonObject) -> dict[str, Any]:
    """How a step went; cycles of versions that measured no step have no ``seconds``."""
    if name.endswith(_ERROR):
        return {
            "step": name.removesuffix(_ERROR),
            "seconds": None,
            "ends": CycleOutcome.FAILED.value,
            "reasons": [record["error"]],
        }
    return {
        "step": name,
        "seconds": record.get("seconds"),
        "ends": record["ends"],
        "reasons": list(record["reasons"]),
    }


def _chosen(output: JsonObject, names: tuple[str, ...]) -> dict[str, Any] | None:
    return {name: output[name] for name in names if name in output} or None


def _training(output: JsonObject) -> dict[str, Any] | None:
    figures = _chosen(output, _TRAINED)
    if figures is None:
        return None
    return {
        **figures,
        **(_chosen(output, _PROPOSED) or {}),
        "hyperparameters": _hyperparameters(output.get("configured", {}), output.get("effective", {})),
        "guards": output.get("guards", {}),
        "series": _series(output),
    }


def _hyperparameters(configured: JsonObject, effective: JsonObject) -> list[dict[str, Any]]:
    """Both values of each name; ``differs`` is None for a name that only one of the two has."""
    return [
        {
            "name": name,
            "configured": configured.get(name),
            "effective": effective.get(name),
            "differs": _differ(configured[name], effective[name]) if name in configured and name in effective else None,
        }
        for name in (*configured, *(name for name in effective if name not in configured))
    ]


def _differ(one: Any, other: Any) -> bool:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (one, other))
    return not math.isclose(one, other, rel_tol=_TOLERANCE) if numbers else one != other


def _series(output: JsonObject) -> dict[str, list[Any]]:
    """Everything that the trainer recorded with one value a step."""
    recorded = {**output, **output.get("series", {})}
    return {
        name: values
        for name, values in recorded.items()
        if isinstance(values, list) and len(values) == output.get("steps") and all(map(_is_number, values))
    }


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))

"""How ``cycle report`` looks on a terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tidegate.cli.output import emit, emit_table

_CURVE = "▁▂▃▄▅▆▇█"
_CURVE_COLUMNS = 40
_FIGURES = (
    ("episodes", "episodes"),
    ("judged", "with a verdict"),
    ("passed", "passed"),
    ("success", "success"),
    ("kinds", "kinds asked"),
    ("kinds_solved", "kinds with a success"),
    ("coverage", "coverage"),
    ("prompts", "prompts with k verdicts"),
    ("k", "k"),
    ("pass_at_1", "pass@1 of these"),
    ("pass_at_k", "pass@k of these"),
    ("strategies", "effective strategies"),
    ("distinct", "distinct-2"),
    ("vendi", "Vendi score"),
    ("vendi_answers", "answers in it"),
    ("entropy", "token entropy (nats)"),
    ("entropy_tokens", "tokens in it"),
    ("temperature", "at temperature"),
    ("tokens", "tokens an episode"),
    ("no_reply", "no reply"),
    ("invalid_tool_call", "invalid tool call"),
    ("refused", "refused"),
)
_KIND_FIGURES = ("episodes", "judged", "passed", "success", "strategies", "distinct", "vendi", "entropy", "tokens")


def print_report(report: dict[str, Any]) -> None:
    """Print a report's sections; one that is empty says why."""
    emit({name: report[name] or "-" for name in ("cycle", "opened_at", "closed_at", "outcome")}, as_json=False)
    for reason in report["reasons"]:
        print(f"reason  {reason}")
    _title("Steps")
    _table(
        ("step", "seconds", "ended the cycle", "reasons"),
        [(step["step"], step["seconds"], step["ends"], "; ".join(step["reasons"])) for step in report["steps"]],
    )
    _title("Curation")
    _curation(report["curation"])
    _title("Training")
    _training(report["training"])
    _title("Monitors")
    _monitors(report["monitors"])


def _curation(curated: dict[str, Any] | None) -> None:
    if curated is None:
        print("nothing was curated")
        return
    emit({name: value for name, value in curated.items() if name != "counts"}, as_json=False)
    _table(("items", "count"), list(curated.get("counts", {}).items()))


def _training(trained: dict[str, Any] | None) -> None:
    if trained is None:
        print("nothing was trained")
        return
    details = ("hyperparameters", "guards", "series")
    emit({name: _shown(value) for name, value in trained.items() if name not in details}, as_json=False)
    marks = {True: "DIFFERS", False: "as configured", None: ""}
    print()
    _table(
        ("hyperparameter", "configured", "effective", ""),
        [
            (one["name"], one["configured"], one["effective"], marks[one["differs"]])
            for one in trained["hyperparameters"]
        ],
    )
    print()
    _table(("guard", "value"), list(trained["guards"].items()))
    print()
    _per_step(trained["series"])


def _per_step(series: dict[str, list[float | None]]) -> None:
    """Each measure at the first, the middle and the last step, and its curve; those without any value are named."""
    known = {name: values for name, values in series.items() if any(value is not None for value in values)}
    if not known:
        print("no measure was recorded step by step")
        return
    length = max(map(len, known.values()))
    chosen = sorted({0, length // 2, length - 1})
    _table(
        ("measure", *(f"step {place + 1}" for place in chosen), "curve", "lowest", "highest"),
        [
            (name, *(values[place] for place in chosen), curve(values), *_extremes(values))
            for name, values in known.items()
        ],
    )
    if len(known) < len(series):
        print(f"without a value in any step: {', '.join(name for name in series if name not in known)}")


def curve(values: Sequence[float | None]) -> str:
    """A line of at most 40 bars, each the mean of its part; blank where nothing is known."""
    columns = min(len(values), _CURVE_COLUMNS)
    edges = [round(column * len(values) / columns) for column in range(columns + 1)]
    parts = [[one for one in values[edges[i] : edges[i + 1]] if one is not None] for i in range(columns)]
    means = [sum(part) / len(part) if part else None for part in parts]
    known = [mean for mean in means if mean is not None]
    low, height = (min(known), max(known) - min(known)) if known else (0.0, 0.0)

    def bar(mean: float | None) -> str:
        if mean is None:
            return " "
        return _CURVE[round((mean - low) / height * (len(_CURVE) - 1))] if height > 0.0 else _CURVE[0]

    return "".join(bar(mean) for mean in means)


def _extremes(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    known = [value for value in values if value is not None]
    return min(known, default=None), max(known, default=None)


def _monitors(monitors: dict[str, Any] | None) -> None:
    if monitors is None:
        print("nothing was measured: this cycle collected no traffic")
        return
    for sentence in monitors["failed"]:
        print(f"FAILED  {sentence}")
    if "releases" not in monitors:
        return
    print(f"episodes read  {monitors['episodes']}; left out: {json.dumps(monitors['excluded'])}")
    _releases(monitors)
    _against_anchor(monitors)


def _releases(monitors: dict[str, Any]) -> None:
    releases = monitors["releases"]
    roles = {name: [role for role in ("champion", "anchor") if monitors[role] == name] for name in releases}
    heads = [f"{name} ({', '.join(roles[name])})" if roles[name] else name for name in releases]
    print()
    _table(
        ("release", *heads),
        [(words, *(measured["all"][name] for measured in releases.values())) for name, words in _FIGURES],
    )
    for name, measured in releases.items():
        if measured["all"]["k"] is None:
            print(f"{name}: no pass@k, no prompt has two verdicts")
    print()
    _table(
        ("kind", "release", *_KIND_FIGURES),
        sorted(
            (kind, name, *(figures[one] for one in _KIND_FIGURES))
            for name, measured in releases.items()
            for kind, figures in measured["kinds"].items()
        ),
    )


def _against_anchor(monitors: dict[str, Any]) -> None:
    print()
    if not monitors["against_anchor"]:
        print("no other release than the anchor answered, or the anchor never did: nothing to compare")
        return
    whose = {"policy": "the policy in force", "shipped": "the policy that ships, as the one in force has none"}
    print(f"Against the anchor, answers paired by prompt or kind; limits of {whose[monitors['limits']]}")
    columns = ("release", "measure", "value", "anchor's", "change", "over", "limit", "p", "narrower")
    rows = [
        (
            name,
            one["measure"],
            one["value"],
            one["anchor"],
            _change(one),
            _over(one),
            one["limit"],
            one["p"],
            _flag(one),
        )
        for name, comparisons in monitors["against_anchor"].items()
        for one in comparisons
    ]
    _table(columns, rows)


def _change(one: dict[str, Any]) -> str:
    if one["change"] is None:
        return "-"
    return f"x {one['change']:.3g}" if one["change_is"] == "ratio" else f"{one['change']:+.3g}"


def _over(one: dict[str, Any]) -> str:
    enough = one["count"] >= one["needed"]
    return f"{one['count']} {one['unit']}" if enough else f"{one['count']} of {one['needed']} {one['unit']}"


def _flag(one: dict[str, Any]) -> str:
    if one["count"] < one["needed"]:
        return "too few"
    return {True: "NARROWER", False: "no", None: ""}[one["narrower"]]


def _title(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    emit_table(columns, [[_shown(cell) for cell in row] for row in rows], as_json=False)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    return f"{value:.4g}" if isinstance(value, float) else str(value)

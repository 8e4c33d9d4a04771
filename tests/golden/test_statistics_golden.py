"""The published and independently computed numbers that the gate's arithmetic must reproduce."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tidegate.core.statistics import (
    EDetector,
    Ledger,
    canary_evidence,
    canary_paths,
    effective_strategies,
    paired_e_value,
    pass_at_k,
    required_pairs,
    sign_test,
    tango_interval,
    vendi_score,
)

VECTORS: dict[str, Any] = json.loads(Path(__file__).with_name("gate_vectors.json").read_text(encoding="utf-8"))


def cases(name: str) -> list[Any]:
    values = VECTORS[name]
    return values["cases"] if isinstance(values, dict) else values


@pytest.mark.parametrize("case", cases("sign_test"))
def test_sign_test_matches_the_vectors(case: dict[str, Any]) -> None:
    assert sign_test(case["wins"], case["losses"]) == pytest.approx(case["p"], rel=case.get("rel_tol", 1e-6))


@pytest.mark.parametrize("case", cases("paired_e_value"))
def test_e_value_matches_the_vectors(case: dict[str, Any]) -> None:
    assert paired_e_value(case["wins"], case["losses"]) == pytest.approx(case["e"], rel=1e-5)


def test_both_tests_take_arrays() -> None:
    signs, evidence = cases("sign_test"), cases("paired_e_value")
    p = sign_test([case["wins"] for case in signs], [case["losses"] for case in signs])
    e = paired_e_value(np.array([case["wins"] for case in evidence]), np.array([case["losses"] for case in evidence]))
    np.testing.assert_allclose(p, [case["p"] for case in signs], rtol=1e-3)
    np.testing.assert_allclose(e, [case["e"] for case in evidence], rtol=1e-5)


@pytest.mark.parametrize("case", cases("tango_95"))
def test_tango_interval_matches_the_vectors(case: dict[str, Any]) -> None:
    assert tango_interval(case["b"], case["c"], case["n"], 0.95) == pytest.approx(case["interval"], abs=1e-6)


@pytest.mark.parametrize("case", cases("pass_at_k"))
def test_pass_at_k_matches_the_vectors(case: dict[str, Any]) -> None:
    assert pass_at_k(case["n"], case["c"], case["k"]) == pytest.approx(case["value"], abs=1e-6)


@pytest.mark.parametrize("case", cases("effective_strategies"))
def test_effective_strategies_matches_the_vectors(case: dict[str, Any]) -> None:
    assert effective_strategies(case["p"]) == pytest.approx(case["value"], abs=1e-6)


@pytest.mark.parametrize("case", cases("power"))
def test_required_pairs_matches_the_vectors(case: dict[str, Any]) -> None:
    assert required_pairs(case["discordance"], case["gain"], case["level"], case["power"]) == case["pairs"]


def test_ledger_matches_the_vectors() -> None:
    case = VECTORS["ledger"]
    ledger = Ledger(alpha=case["alpha"], looks=case["looks"], error_rate=case["error_rate"])
    levels: list[float] = []
    promotions: list[bool] = []
    for p in case["p"]:
        level, promoted, ledger = ledger.record(p)
        levels.append(level)
        promotions.append(promoted)
    assert levels == pytest.approx(case["levels"], abs=1e-6)
    assert promotions == case["promote"]


@pytest.mark.parametrize("case", cases("vendi"))
def test_vendi_score_matches_the_vectors(case: dict[str, Any]) -> None:
    similarity = case.get("similarity") or np.eye(case["identity"])
    assert vendi_score(similarity) == pytest.approx(case["value"], abs=1e-6)


def test_canary_evidence_matches_the_vectors() -> None:
    case = VECTORS["canary"]
    evidence = canary_evidence(case["d"], case["margin"], case["bets"])
    assert evidence.k_plus == pytest.approx(case["k_plus"], abs=1e-6)
    assert evidence.k_minus == pytest.approx(case["k_minus"], abs=1e-6)
    paths = canary_paths(case["d"], case["margin"], case["bets"])
    assert (paths.k_plus[-1], paths.k_minus[-1]) == pytest.approx((evidence.k_plus, evidence.k_minus))


def test_e_detector_matches_the_vectors() -> None:
    case = VECTORS["e_detector_one_bet"]
    detector = EDetector(margin=case["margin"], bets=(case["g"],), alarm_at=1e5)
    assert detector.run(case["d"]) == pytest.approx(case["m"], abs=1e-5)
    for difference, value in zip(case["d"], case["m"], strict=True):
        detector = detector.update(difference)
        assert detector.value == pytest.approx(value, abs=1e-5)

"""The policy file: complete, in range, nothing else; every value in the hash; the shipped ones say the truth."""

from __future__ import annotations

import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from tidegate.core.errors import PolicyError
from tidegate.core.gate import policy_from_values
from tidegate.core.statistics import detectable_gain, required_pairs, tango_lower_bound
from tidegate.gate import load_policy, parse_policy

DEMO_TEXT = (resources.files("tidegate.demo") / "gate.toml").read_text(encoding="utf-8")
DEFAULT_TEXT = (resources.files("tidegate.gate") / "policies" / "default.toml").read_text(encoding="utf-8")


def test_the_shipped_policy_has_the_numbers_of_the_promise() -> None:
    policy = load_policy()
    assert policy.name == "default"
    assert (policy.ledger.alpha, policy.ledger.looks_per_window, policy.ledger.looks_per_epoch) == (0.10, 13, 5)
    assert policy.sealed.min_pairs == required_pairs(0.14, 0.03, 0.0077, 0.8)
    assert policy.non_inferiority.anchor_margin == 0.01
    assert policy.non_inferiority.level == 0.05
    assert policy.screen.kl_budget is None
    unchanged = tango_lower_bound(35, 35, policy.non_inferiority.min_pairs_per_slice)
    assert -policy.non_inferiority.slice_margin < unchanged == pytest.approx(-0.028, abs=5e-4)


def test_the_demo_policy_says_what_it_can_detect() -> None:
    policy, text = parse_policy(DEMO_TEXT, source="demo"), DEMO_TEXT
    level = policy.ledger.alpha / policy.ledger.looks_per_window
    claims = re.findall(r"#\s+(\d+) pairs show gains of ([\d. /]+) at ([\d /]+) % discordant", text)
    assert [int(pairs) for pairs, _, _ in claims] == [policy.sealed.min_pairs, policy.sealed.max_pairs]
    for pairs, gains, discordances in claims:
        computed = [detectable_gain(int(pairs), int(d) / 100, level) for d in discordances.split("/")]
        assert computed == pytest.approx([float(gain) for gain in gains.split("/")], abs=0.005)
    assert f"{required_pairs(0.14, 0.03, level):,} pairs here" in text
    for words, b, c, n in (
        ("-9.4", 5, 5, 60),
        ("-10.6", 6, 7, 69),
        ("-13.5", 5, 8, 69),
        ("-11.9", 0, 0, 20),
        ("-19.6", 0, 1, 20),
        ("-21.4", 3, 3, 20),
        ("-26.2", 0, 2, 20),
    ):
        assert words in text
        assert 100 * tango_lower_bound(b, c, n) == pytest.approx(float(words), abs=0.05)


def test_every_value_is_in_the_hash_and_survives_a_record() -> None:
    policy = parse_policy(DEFAULT_TEXT.replace("[screen]", "[screen]\nkl_budget = 0.1"), source="x")
    assert policy_from_values(policy.values()) == policy
    seen = {policy.hash}
    for section, name, value in leaves(policy.values()):
        changed = "other" if isinstance(value, str) else value[:-1] if isinstance(value, list) else value + 1
        values = policy.values()
        (values[section] if section else values)[name] = changed
        seen.add(policy_from_values(values).hash)
    assert len(seen) == 1 + len(leaves(policy.values()))


def leaves(values: dict[str, Any]) -> list[tuple[str | None, str, Any]]:
    found: list[tuple[str | None, str, Any]] = []
    for name, value in values.items():
        found += [(name, k, v) for k, v in value.items()] if isinstance(value, dict) else [(None, name, value)]
    return found


REQUIRED = [(section, name) for section, name, _ in leaves(tomllib.loads(DEFAULT_TEXT))]


@pytest.mark.parametrize(("section", "name"), REQUIRED)
def test_no_field_may_be_left_out(section: str | None, name: str) -> None:
    lines = [line for line in DEFAULT_TEXT.splitlines() if not line.startswith(f"{name} =")]
    with pytest.raises(PolicyError, match=f"{section}.{name} is missing" if section else f"{name} is missing"):
        parse_policy("\n".join(lines), source="short.toml")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("alpha = 0.10", "alpha = 1.5", r"ledger.alpha = 1.5: Input should be less than 1"),
        ("alpha = 0.10", "alpha = 0", r"ledger.alpha = 0"),
        ("alpha = 0.10", "alpha = nan", "no finite number"),
        ("alpha = 0.10", "alpha = '0.1'", "ledger.alpha = '0.1'"),
        ("alpha = 0.10", "alpha = 1979-05-27", "no finite number"),
        ("alpha = 0.10", "alpha = 0.10\nalhpa = 0.2", "ledger.alhpa = 0.2: Unexpected"),
        ('error_rate = "fdr"', 'error_rate = "none"', "error_rate = 'none'"),
        ("max_pairs = 4000", "max_pairs = 4", "max_pairs = 4 is below min_pairs = 1655"),
        ("min_pairs = 1655", "min_pairs = 0", "min_pairs = 0"),
        ("looks_per_window = 13", f"looks_per_window = {10**400}", "ledger.looks_per_window = 10000"),
        ("samples = 8", f"samples = {10**9 + 1}", "collapse.samples = 1000000001"),
        ("format = 1", f"format = {'[' * 100_000}", "is not TOML"),
        ("level = 0.05", "level = 0.5", "non_inferiority.level = 0.5"),
        ("anchor_margin = 0.01", "anchor_margin = 0.0", "anchor_margin = 0.0"),
        ('decoding = "traffic"', 'decoding = "greedy"', "decoding = 'greedy'"),
        ("bets = [0.05, 0.1, 0.2, 0.4, 0.7]", "bets = [0.05, 1.5]", "canary.bets.1 = 1.5: Input should be less than 1"),
        ("weights = [0.05, 0.25, 0.5]", "weights = [0.5, 0.25]", "rising shares"),
        ("promote_at = 20.0", "promote_at = 0.5", "promote_at = 0.5"),
        ('decoding = "traffic"', 'decoding = "traffic"\ncollapse = "some"', "is not TOML"),
        ('decoding = "traffic"', 'decoding = "traffic"\ncanery = "none"', "canery = 'none': Unexpected"),
        ("format = 1", "format = 2", "format = 2"),
        ("[ledger]", "[ledgers]", "ledger is missing"),
        ("format = 1", "format = = 1", "is not TOML"),
    ],
)
def test_bad_values_are_refused_by_name(old: str, new: str, words: str) -> None:
    assert old in DEFAULT_TEXT
    with pytest.raises(PolicyError, match=words):
        parse_policy(DEFAULT_TEXT.replace(old, new, 1), source="bad.toml")


@pytest.mark.parametrize("stage", ["canary", "holdback", "collapse"])
def test_a_stage_is_left_out_only_by_a_word(stage: str) -> None:
    head, _, rest = DEFAULT_TEXT.partition(f"\n[{stage}]\n")
    without = head + "\n[" + rest.partition("\n[")[2]
    with pytest.raises(PolicyError, match=f"{stage} is missing"):
        parse_policy(without, source="short.toml")
    spelt = without.replace('decoding = "traffic"', f'decoding = "traffic"\n{stage} = "none"')
    assert getattr(parse_policy(spelt, source="spelt.toml"), stage) == "none"
    with pytest.raises(PolicyError, match=f"{stage} = 'some'"):
        parse_policy(spelt.replace(f'{stage} = "none"', f'{stage} = "some"'), source="spelt.toml")
    assert policy_from_values(parse_policy(spelt, source="spelt.toml").values()).hash != load_policy().hash


def test_a_file_is_read_like_the_shipped_text(tmp_path: Path) -> None:
    (tmp_path / "gate.toml").write_text(DEFAULT_TEXT, encoding="utf-8")
    assert load_policy(tmp_path / "gate.toml") == load_policy()


def test_a_missing_or_unreadable_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="does not exist"):
        load_policy(tmp_path / "no.toml")
    with pytest.raises(PolicyError, match="cannot be read"):
        load_policy(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"name = '\xe4'")
    with pytest.raises(PolicyError, match="cannot be read as UTF-8"):
        load_policy(tmp_path / "latin.toml")

"""The collapse lab under the gate policy of the settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tidegate.app.gates import build_policy
from tidegate.config import Settings
from tidegate.core.errors import ConfigError
from tidegate.lab.batches import CURATIONS, Curation
from tidegate.lab.collapse import CollapseRun, run_collapse


def collapse(
    settings: Settings, *, seeds: Iterable[int], rounds: int, curations: Sequence[Curation] = CURATIONS
) -> tuple[CollapseRun, ...]:
    """One run for each seed and curation, seed by seed.

    Raises:
        ConfigError: the policy leaves the collapse tests out, or ``rounds`` or a seed is out of range.
        PolicyError: there is no usable policy.
    """
    policy = build_policy(settings)
    if policy.collapse == "none":
        raise ConfigError(
            f'policy {policy.name!r} has collapse = "none", so that there is no test to watch; give it a [collapse] '
            "section, or leave the setting 'policy' out for the strict policy that ships"
        )
    rules, level = policy.collapse, policy.non_inferiority.level
    return tuple(
        run_collapse(seed=seed, curation=curation, rounds=rounds, rules=rules, level=level)
        for seed in seeds
        for curation in curations
    )

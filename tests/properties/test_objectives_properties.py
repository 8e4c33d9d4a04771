"""Laws of objectives and advantages: parts add up, padding is never read, baselines centre."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.objectives.advantages import (
    group_advantages,
    reinforce_pp,
    rloo,
    running_mean_advantages,
)
from tidegate.core.objectives.distillation import opd
from tidegate.core.objectives.policy import cispo, grpo, gspo, ppo_clip, reinforce
from tidegate.core.objectives.preference import dpo, kto
from tidegate.core.objectives.rows import Aggregation

SUMS = ("sequences", "tokens", "clipped_tokens", "ratio_sum", "old_kl_sum", "reference_kl_sum", "importance_sum")
BUCKETS = 3


@st.composite
def batches(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], Aggregation]:
    """What every objective takes, with counts that fit."""
    rows, width = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    places = draw(
        st.lists(st.lists(st.booleans(), min_size=width, max_size=width).filter(any), min_size=rows, max_size=rows)
    )
    source = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def drawn(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=source, dtype=torch.float64)

    mask = torch.tensor(places)
    logprobs = -4 * drawn(rows, width)
    values = {
        "logprobs_B_T": logprobs,
        "old_B_T": torch.clamp(logprobs + drawn(rows, width) - 0.5, max=0),
        "reference_B_T": torch.clamp(logprobs + drawn(rows, width) - 0.5, max=0),
        "mask_B_T": mask,
        "advantages": drawn(rows) - 0.5,
        "importance_B_T": 3 * drawn(rows, width),
        "buckets_B_T_C": drawn(rows, width, BUCKETS).log_softmax(-1),
        "wanted_B_T_C": drawn(rows, width, BUCKETS).log_softmax(-1),
    }
    how: Any = draw(st.sampled_from(["token", "sequence", "dr_grpo"]))
    return values, Aggregation(how=how, tokens=int(mask.sum()), sequences=rows, max_length=width)


def policy_objective(objective: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    def call(values: dict[str, torch.Tensor], aggregation: Aggregation) -> Any:
        names = ["logprobs_B_T", "old_B_T", "mask_B_T", "advantages", "importance_B_T"]
        if settings:
            names.append("reference_B_T")
        return objective(**{name: values[name] for name in names}, aggregation=aggregation, **settings)

    return call


def distilled(values: dict[str, torch.Tensor], aggregation: Aggregation) -> Any:
    return opd(
        values["buckets_B_T_C"],
        values["wanted_B_T_C"],
        values["mask_B_T"],
        aggregation=aggregation,
        importance_B_T=values["importance_B_T"],
    )


CALLS: dict[str, Callable[..., Any]] = {
    "ppo_clip": policy_objective(ppo_clip),
    "grpo": policy_objective(grpo, beta=0.1),
    "reinforce": policy_objective(reinforce, beta=0.1),
    "gspo": policy_objective(gspo, beta=0.1, eps_low=0.05, eps_high=0.05),
    "cispo": policy_objective(cispo, beta=0.1, eps_high=0.2),
    "opd": distilled,
}


def slopes(name: str, loss: torch.Tensor, values: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.autograd.grad(loss, values["buckets_B_T_C" if name == "opd" else "logprobs_B_T"])[0]


def watched(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: value.clone().requires_grad_() if name in ("logprobs_B_T", "buckets_B_T_C") else value
        for name, value in values.items()
    }


@pytest.mark.parametrize("name", CALLS)
@given(batch=batches(), data=st.data())
def test_parts_add_up_to_the_whole(
    name: str, batch: tuple[dict[str, torch.Tensor], Aggregation], data: st.DataObject
) -> None:
    values, aggregation = watched(batch[0]), batch[1]
    rows = aggregation.sequences
    cuts = sorted(data.draw(st.sets(st.integers(1, rows - 1)))) if rows > 1 else []
    whole = CALLS[name](values, aggregation)
    parts = [
        CALLS[name]({key: value[start:stop] for key, value in values.items()}, aggregation)
        for start, stop in zip([0, *cuts], [*cuts, rows], strict=True)
    ]
    loss = sum((part.loss for part in parts), torch.zeros(()))
    assert loss.item() == pytest.approx(whole.loss.item(), rel=1e-10, abs=1e-13)
    torch.testing.assert_close(slopes(name, loss, values), slopes(name, whole.loss, values), rtol=1e-10, atol=1e-13)
    for field in ("sequences", "tokens", "kl_sum") if name == "opd" else SUMS:
        added = [getattr(part, field) for part in parts]
        if None not in added:
            assert sum(added) == pytest.approx(getattr(whole, field), rel=1e-10, abs=1e-13)


@pytest.mark.parametrize("name", CALLS)
@given(batch=batches(), junk=st.sampled_from([math.nan, math.inf, -math.inf, 7.0]))
def test_what_stands_in_padding_is_never_read(
    name: str, batch: tuple[dict[str, torch.Tensor], Aggregation], junk: float
) -> None:
    values, aggregation = watched(batch[0]), batch[1]
    padding = ~values["mask_B_T"]
    spoiled = watched(
        {
            key: torch.where(padding.reshape(*padding.shape, *[1] * (value.ndim - 2)), junk, value.detach())
            if value.ndim >= 2 and key != "mask_B_T"
            else value
            for key, value in values.items()
        }
    )
    clean, dirty = CALLS[name](values, aggregation), CALLS[name](spoiled, aggregation)
    assert dirty.loss.item() == clean.loss.item()
    found = slopes(name, dirty.loss, spoiled)
    assert torch.equal(found, slopes(name, clean.loss, values))
    assert not found[padding].any()


@given(st.integers(0, 1000), st.integers(2, 6), st.data())
def test_parts_of_preferences_add_up(seed: int, rows: int, data: st.DataObject) -> None:
    sums = -30 * torch.rand(4, rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    liked, weights = sums[3] > -15, sums[2].abs()
    cut = data.draw(st.integers(1, rows - 1))
    calls: list[Callable[[slice], Any]] = [
        lambda part: dpo(*(values[part] for values in sums), total=rows, weights_B=weights[part]),
        lambda part: kto(sums[0][part], sums[1][part], liked[part], total=rows, baseline=1.5, weights_B=weights[part]),
    ]
    for call in calls:
        whole, first, second = call(slice(None)), call(slice(0, cut)), call(slice(cut, None))
        for field in type(whole).__dataclass_fields__:
            added = getattr(first, field) + getattr(second, field)
            assert float(added) == pytest.approx(float(getattr(whole, field)), rel=1e-10, abs=1e-12)


REWARDS = st.floats(-10, 10)
GROUPED = st.lists(st.tuples(REWARDS, st.sampled_from("abc")), min_size=1, max_size=12)
SCALES: list[Any] = ["group", "none", "batch"]


def sums_of_groups(advantages: tuple[float, ...], groups: list[str]) -> list[float]:
    return [sum(a for a, g in zip(advantages, groups, strict=True) if g == name) for name in set(groups)]


@given(GROUPED, st.sampled_from(SCALES))
def test_advantages_sum_to_zero_in_each_group(answers: list[tuple[float, str]], scale: Any) -> None:
    rewards, groups = [r for r, _ in answers], [g for _, g in answers]
    for found in (group_advantages(rewards, groups, scale=scale), rloo(rewards, groups)):
        size = 1.0 + max(map(abs, found))
        assert all(abs(total) <= 1e-9 * size for total in sums_of_groups(found, groups))
    assert abs(sum(reinforce_pp(rewards))) <= 1e-9 * (1.0 + max(map(abs, reinforce_pp(rewards))))


@given(GROUPED)
def test_rloo_is_the_group_mean_up_to_a_factor(answers: list[tuple[float, str]]) -> None:
    rewards, groups = [r for r, _ in answers], [g for _, g in answers]
    for index, (left_out, centred) in enumerate(
        zip(rloo(rewards, groups), group_advantages(rewards, groups, scale="none"), strict=True)
    ):
        others = [rewards[j] for j in range(len(rewards)) if groups[j] == groups[index] and j != index]
        if others:
            size = len(others) + 1
            assert left_out == pytest.approx(rewards[index] - sum(others) / len(others), abs=1e-12)
            assert left_out == pytest.approx(centred * size / (size - 1), abs=1e-12)
        else:
            assert left_out == centred == 0.0


@given(GROUPED, st.floats(0.1, 50))
def test_running_means_look_only_back(answers: list[tuple[float, str]], half_life: float) -> None:
    rewards, slices = [r for r, _ in answers], [s for _, s in answers]
    found = running_mean_advantages(rewards, slices, half_life=half_life)
    for index, advantage in enumerate(found):
        earlier = [rewards[j] for j in range(index) if slices[j] == slices[index]]
        weights = [0.5 ** (age / half_life) for age in range(len(earlier) - 1, -1, -1)]
        baseline = (
            sum(w * r for w, r in zip(weights, earlier, strict=True)) / sum(weights) if earlier else rewards[index]
        )
        assert advantage == pytest.approx(rewards[index] - baseline, abs=1e-9)
    shorter = running_mean_advantages(rewards[:-1] or rewards, slices[:-1] or slices, half_life=half_life)
    assert found[: len(shorter)] == shorter


@given(REWARDS, st.lists(st.sampled_from("abc"), min_size=1, max_size=12), st.sampled_from(SCALES))
def test_equal_rewards_have_no_signal(reward: float, groups: list[str], scale: Any) -> None:
    rewards = [reward] * len(groups)
    for found in (
        group_advantages(rewards, groups, scale=scale),
        rloo(rewards, groups),
        reinforce_pp(rewards),
        running_mean_advantages(rewards, groups, half_life=4.0),
    ):
        assert set(found) == {0.0}

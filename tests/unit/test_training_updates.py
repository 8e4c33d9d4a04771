"""Each objective on packed rows against the same formula on whole sequences, one by one, in double precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tidegate.config.training import TrainingSettings
from tidegate.core.errors import TrainingError
from tidegate.core.types import Example
from tidegate.training.examples import render_example
from tidegate.training.forward import Forward, prepare_forward
from tidegate.training.model import LoraModel, load_model
from tidegate.training.objective import example_advantages, prepare_update
from tidegate.training.packing import TrainingSequence
from tidegate.training.updates import LikelihoodUpdate, Start
from training_fixtures import agent_example, tiny_job, token_example

PROMPTS = ((9, 8, 7, 6), (9, 8, 7, 5), (30, 31))
ANSWERS = ((40, 41, 2), (40, 42, 43, 2), (44, 2), (45, 46, 47, 48, 2))
REWARDS = ((1.0, 0.0, 0.0, 1.0), (0.0, 1.0, 0.5, 0.0), (1.0, 1.0, 0.0, 0.0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("updates")


@pytest.fixture
def trained(folder: Path) -> LoraModel:
    """A tiny model whose adapter changes what it computes."""
    torch.set_num_threads(1)
    model = load_model(tiny_job(folder))
    shake(model, seed=3, scale=0.2)
    return model


def shake(model: LoraModel, *, seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.tensors.values():
            tensor.add_(torch.randn(tensor.shape, generator=generator) * scale)


def answer(prompt: int, number: int, **changes: Any) -> Example:
    token_ids = (*PROMPTS[prompt], *ANSWERS[number])
    example = token_example(token_ids, trained=len(ANSWERS[number]), name=f"p{prompt}a{number}")
    return replace(
        example,
        **{
            "reward": REWARDS[prompt][number],
            "group": f"g{prompt}",
            "kind": f"k{prompt % 2}",
            "sampled_at": number,
            **changes,
        },
    )


def batch() -> list[Example]:
    return [answer(prompt, number) for prompt in range(3) for number in range(4)]


def render(model: LoraModel, examples: Sequence[Example]) -> list[TrainingSequence]:
    return [sequence for example in examples for sequence in render_example(model.tokenizer, example)]


def update_of(model: LoraModel, examples: Sequence[Example], **settings: Any) -> Any:
    threshold = settings.pop("success_threshold", 1.0)
    chosen = TrainingSettings(**{"batch_size": 64, **settings})
    sequences = render(model, examples)
    model.base.set_attn_implementation("sdpa")
    forward = prepare_forward(model.base, model.model, sequences)
    assert forward.packed
    update, left_out = prepare_update(
        forward, examples, sequences, list(model.tensors.values()), chosen, success_threshold=threshold
    )
    return update, left_out, forward


def gradients_of(model: LoraModel, update: Any) -> tuple[float, torch.Tensor, Mapping[str, float]]:
    model.model.zero_grad(set_to_none=True)
    made = update.gradients(update.units)
    return made.loss, gradient(model), made.figures


def gradient(model: LoraModel) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.tensors.values() if p.grad is not None]).double()


def token_logprobs(model: LoraModel, sequence: TrainingSequence) -> torch.Tensor:
    """Log-probabilities of the trained tokens from full logits of this sequence alone."""
    logits = Forward(model.model, None)._model(input_ids=torch.tensor([sequence.token_ids])).logits[0].double()
    places = [index for index, is_trained in enumerate(sequence.loss_mask) if is_trained]
    scores = logits.log_softmax(-1)
    return torch.stack([scores[index - 1, sequence.token_ids[index]] for index in places])


def expected(
    model: LoraModel,
    examples: Sequence[Example],
    loss_of: Callable[[list[torch.Tensor], list[torch.Tensor]], torch.Tensor],
) -> tuple[float, torch.Tensor]:
    """Loss and gradient of a formula over (log-probabilities now, at the start) of every sequence."""
    model.base.set_attn_implementation("sdpa")
    sequences = render(model, examples)
    with torch.no_grad():
        before = [token_logprobs(model, sequence) for sequence in sequences]
    shake(model, seed=11, scale=0.05)
    model.model.zero_grad(set_to_none=True)
    loss = loss_of([token_logprobs(model, sequence) for sequence in sequences], before)
    loss.backward()
    return float(loss.detach()), gradient(model)


def centred(examples: Sequence[Example]) -> list[float]:
    """Rewards minus the mean of their group."""
    groups = {example.group for example in examples}
    mean = {
        g: sum(e.reward or 0.0 for e in examples if e.group == g) / sum(e.group == g for e in examples) for g in groups
    }
    return [(e.reward or 0.0) - mean[e.group] for e in examples]


def clipped(now: list[torch.Tensor], before: list[torch.Tensor], advantages: list[float], beta: float) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for new, old, advantage in zip(now, before, advantages, strict=True):
        ratio = (new - old).exp()
        total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
        total = total + beta * ((old - new).exp() - (old - new) - 1).sum()
    return total / sum(len(new) for new in now)


@pytest.mark.parametrize("at_once", [10_000, 8])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_grpo_is_the_clipped_ratio_with_the_divergence(trained: LoraModel, at_once: int, beta: float) -> None:
    examples = batch()
    settings = {"objective": "grpo", "reward_scale": "none", "kl_coefficient": beta, "max_tokens_at_once": at_once}
    update, left_out, _ = update_of(trained, examples, **settings)
    assert not left_out
    loss, wanted = expected(trained, examples, lambda now, old: clipped(now, old, centred(examples), beta))
    attend_packed(trained)
    found, gradients, figures = gradients_of(trained, update)
    assert found == pytest.approx(loss, rel=1e-5)
    assert float((gradients - wanted).norm() / wanted.norm()) < 1e-4
    assert figures["reward"] == pytest.approx(5.5 / 12)
    assert figures["kl"] > 0
    assert figures["ratio"] != 1.0
    assert figures["effective_sample_size"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("settings", "clip"),
    [
        ({"objective": "grpo"}, (0.2, 0.2)),
        ({"objective": "gspo"}, (3e-4, 4e-4)),
        ({"objective": "cispo"}, (1.0, 4.0)),
        ({"objective": "grpo", "clip_high": 0.28}, (0.2, 0.28)),
        ({"objective": "reinforce", "baseline": "leave_one_out"}, (None, None)),
    ],
)
def test_what_took_effect_is_told(trained: LoraModel, settings: dict[str, Any], clip: tuple[float | None, ...]) -> None:
    update, _, _ = update_of(trained, batch(), **settings, importance_cap=2.0, kl_coefficient=0.1)
    effective = update.effective
    assert (effective["clip_low"], effective["clip_high"]) == clip
    assert effective["baseline"] == settings.get("baseline", "group")
    assert effective["reward_scale"] == (None if "baseline" in settings else "group")
    assert (effective["aggregate"], effective["max_completion"]) == ("token", None)
    assert (effective["importance_cap"], effective["kl_coefficient"]) == (2.0, 0.1)


@pytest.mark.parametrize("objective", ["grpo", "gspo", "cispo"])
def test_the_configured_bounds_clip(trained: LoraModel, objective: str) -> None:
    wide, _, forward = update_of(trained, batch(), objective=objective, clip_low=1.0, clip_high=1e9)
    tight, _ = prepare_update(
        forward, batch(), render(trained, batch()), list(trained.tensors.values()),
        TrainingSettings.model_validate({"objective": objective, "clip_low": 0.0, "clip_high": 0.0}),
        success_threshold=1.0,
    )  # fmt: skip
    shake(trained, seed=11, scale=0.05)
    assert wide.gradients(wide.units).figures["clip_fraction"] == 0.0
    assert tight.gradients(tight.units).figures["clip_fraction"] > 0.2


def test_dr_grpo_divides_by_the_longest_completion(trained: LoraModel) -> None:
    losses: list[torch.Tensor] = []
    for settings in ({"max_completion": 64, "max_length": 500}, {"max_completion": 16, "max_length": 2000}):
        update, _, _ = update_of(trained, batch(), objective="grpo", aggregate="dr_grpo", **settings)
        assert update.effective["max_completion"] == settings["max_completion"]
        losses.append(gradients_of(trained, update)[1])
    assert float((losses[1] - 4 * losses[0]).norm() / losses[1].norm()) < 1e-5


def attend_packed(model: LoraModel) -> None:
    model.base.set_attn_implementation("tidegate_packed")


def test_recorded_probabilities_weigh_the_tokens_up_to_the_cap(trained: LoraModel) -> None:
    plain = batch()
    sequences = render(trained, plain)
    trained.base.set_attn_implementation("sdpa")
    with torch.no_grad():
        start = [token_logprobs(trained, sequence) for sequence in sequences]
    # The first answer was sampled by a policy that found its tokens twice as likely, the second by one that found
    # them ten times less likely; the others by this one.
    shift = {0: 0.6931471805599453, 1: -2.302585092994046}
    examples = [
        replace(
            example,
            logprobs=(
                *[0.0] * (len(example.token_ids) - len(own)),
                *[min(0.0, float(v) + shift.get(i, 0.0)) for v in own],
            ),
        )
        for i, (example, own) in enumerate(zip(plain, start, strict=True))
    ]
    update, _, _ = update_of(trained, examples, objective="reinforce", baseline="leave_one_out")
    recorded = {
        example.id: torch.tensor(example.logprobs[-len(own) :]) for example, own in zip(examples, start, strict=True)
    }

    def formula(now: list[torch.Tensor], _: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for example, new, advantage in zip(examples, now, centred(examples), strict=True):
            weight = (new.detach() - recorded[example.id]).exp().clamp(max=3.0)
            total = total - (weight * advantage * 4 / 3 * new).sum()
        return total / sum(map(len, now))

    loss, wanted = expected(trained, examples, formula)
    attend_packed(trained)
    found, gradients, figures = gradients_of(trained, update)
    assert found == pytest.approx(loss, rel=1e-4)
    assert float((gradients - wanted).norm() / wanted.norm()) < 1e-3
    assert figures["effective_sample_size"] < 0.9
    assert update.effective["sequences_with_recorded_logprobs"] == 12
    off, _, _ = update_of(trained, examples, objective="reinforce", baseline="leave_one_out", importance_cap=0)
    assert gradients_of(trained, off)[2]["effective_sample_size"] == pytest.approx(1.0)


@pytest.mark.parametrize("objective", ["grpo", "reinforce", "gspo", "cispo"])
def test_parts_of_a_batch_add_up(trained: LoraModel, objective: str) -> None:
    results: list[torch.Tensor] = []
    for at_once in (10_000, 6):
        update, _, _ = update_of(
            trained, batch(), objective=objective, max_tokens_at_once=at_once, aggregate="sequence"
        )
        results.append(gradients_of(trained, update)[1])
    assert float((results[0] - results[1]).norm() / results[0].norm()) < 1e-5
    assert float(results[0].norm()) > 0


@pytest.mark.parametrize("at_once", [10_000, 6])
def test_dpo_is_the_logistic_loss_of_the_margin(trained: LoraModel, at_once: int) -> None:
    examples = [answer(0, 0), answer(0, 1), answer(1, 1), answer(1, 0)]
    update, left_out, _ = update_of(trained, examples, objective="dpo", max_tokens_at_once=at_once)
    assert not left_out.get("unpaired")
    start, _, figures = gradients_of(trained, update)
    assert start == pytest.approx(0.6931472, rel=1e-5)
    assert figures["margin"] == pytest.approx(0.0, abs=1e-5)

    def formula(now: list[torch.Tensor], old: list[torch.Tensor]) -> torch.Tensor:
        change = [new.sum() - before.sum() for new, before in zip(now, old, strict=True)]
        margins = torch.stack([change[0] - change[1], change[2] - change[3]])
        return -torch.nn.functional.logsigmoid(0.1 * margins).mean()

    loss, wanted = expected(trained, examples, formula)
    attend_packed(trained)
    found, gradients, _ = gradients_of(trained, update)
    assert found == pytest.approx(loss, rel=1e-5)
    assert float((gradients - wanted).norm() / wanted.norm()) < 1e-4


def sequence_loss(objective: str, new: torch.Tensor, old: torch.Tensor, advantage: float) -> torch.Tensor:
    """Sum over an answer's tokens, written from the papers."""
    ratio = (new - old).exp()
    if objective == "reinforce":
        return -(ratio.detach().clamp(max=3.0) * advantage * new).sum()
    if objective == "cispo":
        return -(ratio.detach().clamp(0.0, 5.0) * advantage * new).sum()
    low, high = (0.2, 0.2) if objective == "grpo" else (3e-4, 4e-4)
    if objective == "gspo":
        ratio = (new - old).mean().exp().expand(len(new))
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage).sum()


def weighted_batch() -> tuple[list[Example], list[float]]:
    """Examples of unequal weight, and the weights with a mean of 1."""
    weights = [1.0 + index for index in range(12)]
    examples = [replace(example, weight=weight) for example, weight in zip(batch(), weights, strict=True)]
    return examples, [weight * 12 / sum(weights) for weight in weights]


@pytest.mark.parametrize("at_once", [10_000, 8])
@pytest.mark.parametrize("objective", ["sft", "grpo", "reinforce", "gspo", "cispo"])
def test_the_weight_of_an_example_multiplies_its_loss(trained: LoraModel, objective: str, at_once: int) -> None:
    examples, weights = weighted_batch()
    scale = {} if objective == "sft" else {"baseline": "group", "reward_scale": "none"}
    update, _, _ = update_of(trained, examples, objective=objective, max_tokens_at_once=at_once, **scale)

    def formula(now: list[torch.Tensor], before: list[torch.Tensor]) -> torch.Tensor:
        advantages = [1.0] * 12 if objective == "sft" else centred(examples)
        total = torch.zeros((), dtype=torch.float64)
        for new, old, advantage, weight in zip(now, before, advantages, weights, strict=True):
            own = -new.sum() if objective == "sft" else sequence_loss(objective, new, old, advantage)
            total = total + weight * own
        return total / sum(map(len, now))

    loss, wanted = expected(trained, examples, formula)
    attend_packed(trained)
    found, gradients, figures = gradients_of(trained, update)
    assert found == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert float((gradients - wanted).norm() / wanted.norm()) < 1e-3
    if objective not in ("sft", "reinforce"):
        assert figures["effective_sample_size"] == pytest.approx(1.0)


def test_a_weight_counts_across_steps(trained: LoraModel) -> None:
    """A step of light examples moves less than one of heavy ones: it is not divided by its own weights."""
    examples, weights = weighted_batch()
    choices: tuple[dict[str, Any], ...] = ({}, {"kl_coefficient": 0.5})
    for settings in choices:
        update, _, forward = update_of(trained, examples, **settings)
        parameters, plain = list(trained.tensors.values()), render(trained, batch())
        even, _ = prepare_update(
            forward, batch(), plain, parameters, TrainingSettings(**settings), success_threshold=1.0
        )
        shake(trained, seed=17, scale=0.05)
        for index in (0, 11):
            pulls: list[torch.Tensor] = []
            for one in (update, even):
                trained.model.zero_grad(set_to_none=True)
                one.gradients([one.units[index]])
                pulls.append(gradient(trained))
            assert float(pulls[0].norm() / pulls[1].norm()) == pytest.approx(weights[index], rel=1e-4)


@pytest.mark.parametrize("objective", ["sft", "grpo", "dpo", "kto"])
def test_one_weight_for_all_changes_nothing(trained: LoraModel, objective: str) -> None:
    pulls: list[torch.Tensor] = []
    for weight in (1.0, 0.3):
        update, _, _ = update_of(trained, [replace(e, weight=weight) for e in batch()], objective=objective)
        pulls.append(gradients_of(trained, update)[1])
    assert float((pulls[0] - pulls[1]).norm() / pulls[0].norm()) < 1e-6


@pytest.mark.parametrize("at_once", [10_000, 6])
def test_a_pair_weighs_the_mean_of_its_answers(trained: LoraModel, at_once: int) -> None:
    weights = (1.0, 3.0, 0.5, 0.3)
    plain = [answer(0, 0), answer(0, 1), answer(1, 1), answer(1, 0)]
    examples = [replace(example, weight=weight) for example, weight in zip(plain, weights, strict=True)]
    update, _, _ = update_of(trained, examples, objective="dpo", max_tokens_at_once=at_once)

    def formula(now: list[torch.Tensor], old: list[torch.Tensor]) -> torch.Tensor:
        change = [new.sum() - before.sum() for new, before in zip(now, old, strict=True)]
        margins = torch.stack([change[0] - change[1], change[2] - change[3]])
        shares = torch.tensor([2.0, 0.4]).double() / 1.2
        return -(shares * torch.nn.functional.logsigmoid(0.1 * margins)).mean()

    loss, wanted = expected(trained, examples, formula)
    attend_packed(trained)
    found, gradients, _ = gradients_of(trained, update)
    assert found == pytest.approx(loss, rel=1e-5)
    assert float((gradients - wanted).norm() / wanted.norm()) < 1e-4


@pytest.mark.parametrize("at_once", [10_000, 6])
def test_a_thumb_weighs_what_its_answer_does(trained: LoraModel, at_once: int) -> None:
    weights = (1.0, 3.0, 0.5, 0.3)
    plain = [answer(0, 0), answer(0, 1), answer(2, 1), answer(1, 0)]
    examples = [replace(example, weight=weight) for example, weight in zip(plain, weights, strict=True)]
    update, _, _ = update_of(trained, examples, objective="kto", max_tokens_at_once=at_once)
    found, gradients, _ = gradients_of(trained, update)  # at the start: nothing has moved, the bar is 0
    trained.base.set_attn_implementation("sdpa")
    trained.model.zero_grad(set_to_none=True)
    sums = [token_logprobs(trained, sequence).sum() for sequence in render(trained, examples)]
    loss = torch.zeros((), dtype=torch.float64)
    for example, total, weight in zip(examples, sums, weights, strict=True):
        sign = 1.0 if example.reward == 1.0 else -1.0
        loss = loss + weight / 1.2 * torch.sigmoid(-0.1 * sign * (total - total.detach())) / 4
    loss.backward()
    assert found == pytest.approx(float(loss.detach()), rel=1e-5)
    wanted = gradient(trained)
    assert float((gradients - wanted).norm() / wanted.norm()) < 1e-4


@pytest.mark.parametrize("at_once", [10_000, 1])
def test_the_bar_of_kto_comes_from_answers_to_other_prompts(trained: LoraModel, at_once: int) -> None:
    examples = [answer(0, 0), answer(0, 3), answer(0, 1), answer(1, 0)]  # two right ones, two wrong ones
    # The next answer to another prompt, from the first on.
    foreign = [
        token_example((*PROMPTS[prompt], *ANSWERS[number]), trained=len(ANSWERS[number]))
        for prompt, number in ((0, 0), (0, 0), (0, 0), (1, 0))
    ]
    update, _, _ = update_of(trained, examples, objective="kto", max_tokens_at_once=at_once, preference_beta=0.5)

    def formula(now: list[torch.Tensor], old: list[torch.Tensor]) -> torch.Tensor:
        change = torch.stack([new.sum() - before.sum() for new, before in zip(now, old, strict=True)])
        bar = change[4:].mean().detach()
        assert float(bar) > 0.01
        return torch.sigmoid(-0.5 * (change[:4] - bar) * torch.tensor([1.0, 1.0, -1.0, -1.0])).mean()

    loss, wanted = expected(trained, [*examples, *foreign], formula)
    attend_packed(trained)
    found, gradients, _ = gradients_of(trained, update)
    assert found == pytest.approx(loss, rel=1e-5)
    assert float((gradients - wanted).norm() / wanted.norm()) < 1e-4
    if at_once == 1:  # every row a sequence of its own: two passes over the answers, one over the foreign ones
        inputs = [sequence.input_length for sequence in render(trained, [*examples, *foreign])]
        assert update.gradients(update.units).nodes == 2 * sum(inputs[:4]) + sum(inputs[4:])


def test_what_no_foreign_answer_fits_behind_sets_no_bar(trained: LoraModel) -> None:
    examples = [answer(2, 3), answer(0, 1), answer(1, 0)]
    examples[0] = replace(examples[0], reward=1.0)
    update, _, _ = update_of(trained, examples, objective="kto", max_length=8)
    assert update.effective["without_foreign_answer"] == 0
    longer = replace(examples[0], token_ids=(30, 31, *range(50, 56)), loss_mask=(0, 0, *[1] * 6))
    update, _, _ = update_of(trained, [longer, answer(0, 1)], objective="kto", max_length=8)
    assert update.effective["without_foreign_answer"] == 1  # the short answer fits behind the short prompt only
    assert all(len(sequence.token_ids) <= 8 for sequence in update._foreign.values())
    alone = update.gradients([unit for unit in update.units if unit[0].example_id == "p0a1"])
    assert alone.loss == pytest.approx(0.5, rel=1e-4)


def test_kto_raises_what_was_liked_and_lowers_what_was_not(trained: LoraModel) -> None:
    examples = [answer(0, 0), answer(0, 1), answer(2, 1), answer(1, 0)]
    update, _, forward = update_of(trained, examples, objective="kto")
    _, gradients, figures = gradients_of(trained, update)
    assert figures["accuracy"] in (0.0, 0.5, 1.0)
    sums = {e.id: logprob_sum(forward, trained, e) for e in examples}
    step = 0.05 / float(gradients.norm())
    with torch.no_grad():
        for tensor in trained.tensors.values():
            if tensor.grad is not None:
                tensor.sub_(step * tensor.grad)
    change = {e.id: logprob_sum(forward, trained, e) - sums[e.id] for e in examples}
    assert (
        sum(change[e.id] for e in examples if e.reward == 1.0) > 0 > sum(change[e.id] for e in examples if not e.reward)
    )


def logprob_sum(forward: Forward, model: LoraModel, example: Example) -> float:
    (row,) = forward.parts(render(model, [example]), max_nodes=10_000)
    with torch.no_grad():
        return float(forward.logprobs(row, forward.logits(row)).sum())


def test_a_divergence_holds_the_likelihood_back(trained: LoraModel) -> None:
    examples = [agent_example(number) for number in range(4)]
    sequences = render(trained, examples)
    forward = prepare_forward(trained.base, trained.model, sequences)
    parameters = list(trained.tensors.values())
    free = LikelihoodUpdate(forward, sequences, parameters, TrainingSettings())
    held = LikelihoodUpdate(forward, sequences, parameters, TrainingSettings(kl_coefficient=2.0))
    loss, pull, figures = gradients_of(trained, free)
    assert "kl" not in figures
    same, also, at_start = gradients_of(trained, held)
    assert at_start["kl"] == pytest.approx(0.0, abs=1e-6)
    assert (same, float((also - pull).norm())) == (pytest.approx(loss, rel=1e-5), pytest.approx(0.0, abs=1e-4))
    shake(trained, seed=5, scale=0.1)
    moved, _, away = gradients_of(trained, held)
    unheld, _, _ = gradients_of(trained, free)
    assert away["kl"] > 0.001
    assert moved == pytest.approx(unheld + 2.0 * away["kl"], rel=1e-4)


def test_the_start_stays_what_it_was_and_so_does_what_is_trained(trained: LoraModel) -> None:
    start = Start(list(trained.tensors.values()))
    before = {name: tensor.detach().clone() for name, tensor in trained.tensors.items()}
    shake(trained, seed=7, scale=1.0)
    after = {name: tensor.detach().clone() for name, tensor in trained.tensors.items()}
    with start.in_force():
        assert all(torch.equal(trained.tensors[name], tensor) for name, tensor in before.items())
    assert all(torch.equal(trained.tensors[name], tensor) for name, tensor in after.items())
    with pytest.raises(ZeroDivisionError), start.in_force():
        _ = 1 / 0
    assert all(torch.equal(trained.tensors[name], tensor) for name, tensor in after.items())


def test_answers_that_tell_nothing_are_counted(trained: LoraModel) -> None:
    examples = [
        *(answer(0, number) for number in range(4)),
        *(answer(1, number, reward=1.0) for number in range(4)),
        answer(2, 0),
        replace(answer(2, 1), group=None),
        replace(answer(2, 2), reward=None),
    ]
    update, left_out, _ = update_of(trained, examples, objective="grpo")
    assert left_out == {"unscored": 1, "without_comparison": 2, "as_expected": 4}
    assert sum(map(len, update.units)) == 4
    update, left_out, _ = update_of(trained, examples, objective="dpo")
    assert left_out == {"unscored": 1, "unpaired": 6}
    assert [len(unit) for unit in update.units] == [2, 2]


@pytest.mark.parametrize(
    ("settings", "examples", "says"),
    [
        ({"objective": "grpo"}, [answer(0, n, reward=1.0) for n in range(4)], "4 as_expected.*'slice'"),
        ({"objective": "grpo"}, [answer(p, 0) for p in range(3)], "3 without_comparison"),
        ({"objective": "grpo"}, [answer(0, n, reward=None) for n in range(4)], "4 unscored"),
        ({"objective": "dpo"}, [answer(0, 0), answer(1, 0)], "no prompt has two different answers of unequal reward"),
        (
            {"objective": "dpo"},
            [answer(0, 0, reward=1.0), replace(answer(0, 0, reward=0.0), id="again")],
            "2 same_answer",
        ),
        ({"objective": "kto"}, [answer(0, 0), answer(0, 3)], "2 right and 0 wrong"),
        ({"objective": "kto"}, [answer(0, 0), answer(0, 1)], "all 2 answers belong to one prompt"),
        (
            {"objective": "kto", "max_length": 6},
            [answer(0, 0), answer(1, 0)],
            "no answer fits behind another prompt within training.max_length = 6",
        ),
    ],
)
def test_an_update_that_would_change_nothing_is_an_error(
    trained: LoraModel, settings: dict[str, Any], examples: list[Example], says: str
) -> None:
    with pytest.raises(TrainingError, match=says):
        update_of(trained, examples, **settings)


def test_pairs_are_of_the_best_with_the_worst_of_a_group(trained: LoraModel) -> None:
    rewards = (0.9, 0.2, 0.6, 0.4)
    examples = [answer(0, number, reward=reward) for number, reward in enumerate(rewards)]
    update, left_out, _ = update_of(trained, [*examples, answer(1, 0, reward=0.3)], objective="dpo")
    assert [[sequence.example_id for sequence in unit] for unit in update.units] == [["p0a0", "p0a1"], ["p0a2", "p0a3"]]
    assert left_out == {"unpaired": 1}
    update, left_out, _ = update_of(trained, [answer(0, n, reward=min(0.5, r)) for n, r in enumerate(rewards)],
                                    objective="dpo")  # fmt: skip
    assert [[sequence.example_id for sequence in unit] for unit in update.units] == [["p0a0", "p0a1"], ["p0a2", "p0a3"]]
    update, left_out, _ = update_of(trained, [answer(0, n, reward=r) for n, r in enumerate((0.7, 0.7, 0.7, 0.1))],
                                    objective="dpo")  # fmt: skip
    assert [[sequence.example_id for sequence in unit] for unit in update.units] == [["p0a0", "p0a3"]]
    assert left_out == {"unpaired": 2}


@pytest.mark.parametrize(("threshold", "right"), [(1.0, 1), (0.7, 2), (0.5, 3)])
def test_the_threshold_of_curation_says_what_kto_likes(trained: LoraModel, threshold: float, right: int) -> None:
    examples = [answer(0, 0, reward=1.0), answer(0, 1, reward=0.7), answer(1, 2, reward=0.5), answer(1, 3, reward=0.1)]
    update, _, _ = update_of(trained, examples, objective="kto", success_threshold=threshold)
    assert (update.effective["right"], update.effective["wrong"]) == (right, 4 - right)
    assert update.effective["success_threshold"] == threshold


def test_one_answer_a_prompt_learns_from_earlier_ones_of_its_kind(trained: LoraModel) -> None:
    examples = [answer(0, n, group=f"only-{n}") for n in range(4)]
    with pytest.raises(TrainingError, match="without_comparison"):
        update_of(trained, examples, objective="reinforce")
    for baseline in ("slice", "batch"):
        update, _, _ = update_of(trained, examples, objective="reinforce", baseline=baseline)
        assert float(gradients_of(trained, update)[1].norm()) > 0


def test_the_order_of_sampling_decides_what_came_earlier() -> None:
    settings = TrainingSettings(objective="reinforce", baseline="slice")
    examples = [answer(0, n) for n in range(4)]
    turned = [replace(example, sampled_at=-float(example.sampled_at or 0.0)) for example in examples]
    assert example_advantages(examples, settings) == example_advantages(examples[::-1], settings)
    assert example_advantages(examples, settings) != example_advantages(turned, settings)


def test_a_single_step_needs_no_pass_before_it_and_computes_the_same(trained: LoraModel) -> None:
    one, _, _ = update_of(trained, batch(), objective="grpo", epochs=1)
    several, _, _ = update_of(trained, batch(), objective="grpo", epochs=2)
    assert not one._start
    assert several._start
    loss, gradients, figures = gradients_of(trained, several)
    found, also, same = gradients_of(trained, one)
    assert found == pytest.approx(loss, abs=1e-6)
    assert float((also - gradients).norm() / gradients.norm()) < 1e-5
    assert same == pytest.approx(figures, abs=1e-6)
    assert one._start.keys() == several._start.keys()


def test_the_same_answer_twice_counts_twice(trained: LoraModel) -> None:
    once = [answer(0, 0), answer(0, 1)]
    update, _, _ = update_of(trained, [*once, *once], objective="reinforce", reward_scale="none", aggregate="sequence")
    assert sum(map(len, update.units)) == 4
    _, doubled, _ = gradients_of(trained, update)
    single, _, _ = update_of(trained, once, objective="reinforce", reward_scale="none", aggregate="sequence")
    _, expected_gradients, _ = gradients_of(trained, single)
    assert float((doubled - expected_gradients).norm() / expected_gradients.norm()) < 1e-4

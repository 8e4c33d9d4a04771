"""Packed rows give the losses and gradients of sequences computed one by one, or are not used."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from tidegate.core.objectives.sft import weighted_nll
from tidegate.training.attention import PackedAttention, attends_to_everything
from tidegate.training.examples import render_example
from tidegate.training.forward import Forward, prepare_forward
from tidegate.training.model import LoraModel, load_model
from tidegate.training.packing import TrainingSequence
from training_fixtures import agent_example, tiny_job, token_example


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> LoraModel:
    """A tiny model whose adapter changes what it computes."""
    torch.set_num_threads(1)
    model = load_model(tiny_job(tmp_path_factory.mktemp("forward")))
    torch.manual_seed(3)
    with torch.no_grad():
        for tensor in model.tensors.values():
            tensor.normal_(std=0.2)
    return model


@pytest.fixture
def sequences(trained: LoraModel) -> list[TrainingSequence]:
    """Shared beginnings at several depths, a repetition, one stranger, unequal weights."""
    rendered = [
        sequence
        for number in range(4)
        for sequence in render_example(trained.tokenizer, agent_example(number, weight=0.5 + number))
    ]
    strangers = [
        token_example([9, 8, 7, 6, 5, 4], trained=3),
        token_example([9, 8, 7, 6, 5, 4], trained=2),
        token_example([9, 8, 7, 6, 9], trained=2, weight=3.0),
        token_example([9, 8], trained=1),
    ]
    return rendered + [s for example in strangers for s in render_example(trained.tokenizer, example)]


def loss_and_gradients(
    forward: Forward, trained: LoraModel, batch: Sequence[TrainingSequence], *, max_nodes: int
) -> tuple[float, torch.Tensor, int]:
    total = sum(sequence.weight * sum(sequence.loss_mask) for sequence in batch)
    trained.model.zero_grad(set_to_none=True)
    rows = forward.parts(batch, max_nodes=max_nodes)
    loss = 0.0
    for row in rows:
        targets, weights = torch.tensor(row.targets), torch.tensor(row.weights)
        part = weighted_nll(forward.logits(row), targets, weights, total_weight=total)
        part.backward()
        loss += float(part.detach())
    gradient = torch.cat([p.grad.flatten() for p in trained.tensors.values() if p.grad is not None])
    return loss, gradient, sum(len(row.token_ids) for row in rows)


@pytest.mark.parametrize("max_nodes", [10_000, 120])
def test_packed_gradients_are_those_of_single_sequences(
    trained: LoraModel, sequences: list[TrainingSequence], max_nodes: int
) -> None:
    plain = Forward(trained.model, None)
    trained.base.set_attn_implementation("sdpa")
    expected, gradient, nodes = loss_and_gradients(plain, trained, sequences, max_nodes=max_nodes)
    packed = prepare_forward(trained.base, trained.model, sequences)
    assert packed.packed
    loss, packed_gradient, packed_nodes = loss_and_gradients(packed, trained, sequences, max_nodes=max_nodes)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert float((packed_gradient - gradient).norm() / gradient.norm()) < 1e-5
    assert packed_nodes < nodes


def test_the_loss_is_that_of_full_logits(trained: LoraModel, sequences: list[TrainingSequence]) -> None:
    trained.base.set_attn_implementation("sdpa")
    forward = prepare_forward(trained.base, trained.model, sequences)
    assert forward.packed
    loss, _, _ = loss_and_gradients(forward, trained, sequences, max_nodes=10_000)
    trained.base.set_attn_implementation("sdpa")
    total = summed = 0.0
    with torch.no_grad():
        for sequence in sequences:
            logits = trained.model(input_ids=torch.tensor([sequence.token_ids])).logits[0].double().log_softmax(-1)
            for index, is_trained in enumerate(sequence.loss_mask):
                if is_trained:
                    summed -= sequence.weight * float(logits[index - 1, sequence.token_ids[index]])
                    total += sequence.weight
    assert loss == pytest.approx(summed / total, rel=1e-5)


class Leaky(PackedAttention):
    """Packed attention with a fault: every segment sees its own later tokens."""

    def layout(self, pack: Any) -> None:
        super().layout(pack)
        self._masks = [
            torch.ones(length, length + sum(self._lengths[a] for a in segment.ancestors), dtype=torch.bool)
            for segment, length in zip(self._segments, self._lengths, strict=True)
        ]


def test_attention_that_computes_something_else_is_not_used(
    trained: LoraModel, sequences: list[TrainingSequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.training.attention.PackedAttention", Leaky)
    trained.base.set_attn_implementation("sdpa")
    forward = prepare_forward(trained.base, trained.model, sequences)
    assert not forward.packed
    assert trained.base.config._attn_implementation == "sdpa"


def test_unknown_attention_options_are_refused() -> None:
    attention = PackedAttention()
    with pytest.raises(NotImplementedError, match="softcap"):
        attention(None, torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4), None, softcap=50.0)


def mistral(**changes: Any) -> MistralForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    return MistralForCausalLM(MistralConfig(**sizes, **changes)).eval()


def test_windows_are_computed_one_by_one(sequences: list[TrainingSequence]) -> None:
    windowed, whole = mistral(sliding_window=4), mistral(sliding_window=None)
    assert not attends_to_everything(windowed.config)
    assert not prepare_forward(windowed, windowed, sequences).packed
    assert attends_to_everything(whole.config)
    assert prepare_forward(whole, whole, sequences).packed


def test_layer_types_decide_where_they_are_named() -> None:
    config = mistral(sliding_window=None).config
    for kinds, expected in ((["full_attention"], True), (["full_attention", "sliding_attention"], False)):
        config.layer_types = kinds
        assert attends_to_everything(config) is expected


def test_loading_says_nothing_unasked(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_model(tiny_job(tmp_path))

"""TRL's SFTTrainer and DPOTrainer as a backend. The only module that knows TRL or datasets.

TRL brings its own losses, batches and loop. What it is given comes from the trainer, so that both backends train the
same thing: the model with its start weights, token sequences with masks, the steps with their order and learning
rates, and the optimizer. It writes to the job's own folder, reports to nobody and asks no hub.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import PrinterCallback, TrainerCallback

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from datasets import Dataset
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

from tidegate.core.errors import TrainingError
from tidegate.machine import available_memory_bytes
from tidegate.training.checkpoint import checkpoint_of
from tidegate.training.fitting import Fitted, PreparedRun, state_plan
from tidegate.training.forward import Forward
from tidegate.training.memory import bound_of_row, require_memory
from tidegate.training.model import LoraModel, compute_without_dropout
from tidegate.training.objective import preference_pairs
from tidegate.training.packing import TrainingSequence
from tidegate.training.record import Emit, RunRecord
from tidegate.training.schedule import plan_run
from tidegate.training.trl_plan import Parts, cut_steps
from tidegate.training.updates import StepFigures, Unit, mean_length

_IGNORED = -100
"""Label of a token that is not predicted, as transformers wants it."""

_LOGITS_COPIES = 10
"""Most copies of the logits at every position of a row at once: scores, their float copy, log-probabilities, entropies,
gradients, and those of the reference. A run over 1,600 positions and 32,000 tokens peaked at about 8, imports aside."""

_REFERENCE = "ref"
"""Name of the adapter with the weights of the start, as DPOTrainer adds it."""

_FIGURES = {"entropy": "entropy", "rewards/margins": "margin", "rewards/accuracies": "accuracy"}
"""Figures of a step by TRL's names for them."""


def fit(run: PreparedRun, *, emit: Emit, clock: Callable[[], float]) -> Fitted:
    """Train the run's LoRA matrices; see :meth:`tidegate.training.backends.Backend.fit`."""
    job, settings, trained = run.job, run.job.training, run.trained
    units, left_out = _units(run)
    steps = plan_run(units, settings, seed=job.seed)
    parts = cut_steps(units, steps, max_tokens=settings.max_tokens_at_once)
    bound = bound_of_row(
        trained,
        settings,
        nodes=parts.widest,
        predictions=parts.widest,
        logits_copies=_LOGITS_COPIES,
        starts=int(settings.objective == "dpo"),
    )
    require_memory(bound, available_memory_bytes())
    state_plan(job, units, bound, emit)
    optimizer = torch.optim.AdamW(trained.tensors.values(), lr=1.0, weight_decay=settings.weight_decay, fused=True)
    with (
        tempfile.TemporaryDirectory(prefix="trl-", dir=run.scratch) as folder,
        warnings.catch_warnings(),
        _without_dropout(trained),
        _own_adapter_only(trained),
    ):
        warnings.simplefilter("ignore")  # what TRL and transformers say of their own future
        trainer = _trainer(run, units, parts, optimizer=optimizer, folder=folder)
        record = RunRecord(  # after the trainer, whose reference is the start and no checkpoint
            steps, trained.tensors, optimizer, checkpoint_of(job),
            checkpoint_steps=settings.checkpoint_steps, emit=emit, clock=clock,
        )  # fmt: skip
        trainer.follow(record, units, parts)
        trainer.train()
        effective: Mapping[str, object] = trainer.in_effect()
    return Fitted(
        result=record.result(),
        units=units,
        left_out=left_out,
        effective={**effective, "backend": "trl", "packed": False, "parts_a_step": parts.a_step},
        bound=bound,
        forward=Forward(trained.model, None),
    )


def _units(run: PreparedRun) -> tuple[Sequence[Unit], Mapping[str, int]]:
    if run.job.training.objective == "dpo":
        return preference_pairs(run.examples, run.sequences)
    return [(sequence,) for sequence in run.sequences], {}


def _trainer(
    run: PreparedRun,
    units: Sequence[Unit],
    parts: Parts,
    *,
    optimizer: torch.optim.Optimizer,
    folder: str,
) -> _Sft | _Dpo:
    """The objective's trainer, with the weights as they are now for its reference."""
    settings, tokenizer = run.job.training, run.trained.tokenizer
    # Padding is masked: any token will do, and not every tokenizer names one.
    padding = tokenizer.pad_token or tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    arguments: dict[str, Any] = {
        "output_dir": folder,
        "num_train_epochs": 1,  # one pass over the parts of the whole run
        "gradient_accumulation_steps": parts.a_step,
        "max_grad_norm": settings.max_grad_norm,
        "seed": run.job.seed % 2**32,  # nothing is drawn; numpy takes no more
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,  # the model as it is loaded has it where it is asked for
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "max_length": None,
        "pad_token": padding,
        "router_aux_loss_coef": 0.0,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,
        "save_strategy": "no",
        "report_to": "none",
        "push_to_hub": False,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
    }
    given: dict[str, Any] = {
        "model": run.trained.model,
        "processing_class": tokenizer,
        "optimizers": (optimizer, None),
    }
    if settings.objective == "sft":
        return _Sft(
            args=SFTConfig(**arguments, loss_type="nll", packing=False, dataset_kwargs={"skip_prepare_dataset": True}),
            train_dataset=Dataset.from_list([_labelled(unit) for unit in units]),
            **given,
        )
    return _Dpo(
        args=DPOConfig(**arguments, beta=settings.preference_beta, loss_type=["sigmoid"]),
        train_dataset=Dataset.from_list([_compared(unit) for unit in units]),
        data_collator=_PairCollator(tokenizer.convert_tokens_to_ids(padding)),
        **given,
    )


def _shares(members: Sequence[Sequence[int]], signal: Sequence[int], a_step: int) -> list[float]:
    """What makes a step's mean of means over its parts a mean over its tokens or pairs: a factor for each part."""
    sizes = [sum(signal[index] for index in part) for part in members]
    steps = [sum(sizes[first : first + a_step]) for first in range(0, len(sizes), a_step)]
    return [size * a_step / steps[number // a_step] for number, size in enumerate(sizes)]


class _Planned:
    """Steps as they are planned, exact sums over their parts, and no word to anybody outside.

    ``passes`` is how often a step computes its tokens forward.
    """

    passes: int
    members: Sequence[Sequence[int]]
    shares: Iterator[float]

    def follow(self, record: RunRecord, units: Sequence[Unit], parts: Parts) -> None:
        """Do what the record says remains to do, and take it down there."""
        trainer: Any = self
        rates = [step.learning_rate for step in record.remaining]
        trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            trainer.optimizer, lambda step: rates[min(step, len(rates) - 1)]
        )
        self.members = parts.members[record.resumed_at * parts.a_step :]
        self.shares = iter(_shares(self.members, [self.signal(unit) for unit in units], parts.a_step))
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(_Recorder(record, units, parts, passes=self.passes))

    def signal(self, unit: Unit) -> int:
        """What the loss is a mean over: how many of it a unit holds."""
        raise NotImplementedError

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The parts of all steps in their order."""
        trainer: Any = self
        return DataLoader(
            trainer.train_dataset,
            batch_sampler=[list(part) for part in self.members],
            collate_fn=trainer.data_collator,
        )

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """TRL's loss of one part; where it is a mean over the part, by the part's share of the step."""
        above: Any = super()
        loss = above.compute_loss(model, inputs, return_outputs=False, num_items_in_batch=num_items_in_batch)
        share = next(self.shares)
        trainer: Any = self
        of_step = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
        return loss if of_step else loss * share

    def _send_telemetry(self) -> None:
        """Tell nobody."""


class _Sft(_Planned, SFTTrainer):
    """Likelihood of the labelled tokens."""

    passes = 1

    def signal(self, unit: Unit) -> int:
        """Trained tokens."""
        return sum(sequence.trained for sequence in unit)

    def in_effect(self) -> Mapping[str, object]:
        """Hyperparameters of the objective as they took effect."""
        return {"objective": "sft"}


class _Dpo(_Planned, DPOTrainer):
    """Pairs of recorded answers, the start as the reference."""

    passes = 2

    def signal(self, unit: Unit) -> int:
        """One pair."""
        del unit
        return 1

    def in_effect(self) -> Mapping[str, object]:
        """Hyperparameters of the objective as they took effect."""
        pairs = len(self.train_dataset)
        return {"objective": "dpo", "preference_beta": float(self.beta), "right": pairs, "wrong": pairs}

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        """Recorded tokens stay as they are."""
        return dataset


class _PairCollator:
    """Pairs as DPOTrainer computes them: all better answers, then all worse ones, padded on the right."""

    def __init__(self, padding: int) -> None:
        self._padding = padding

    def __call__(self, pairs: Sequence[Mapping[str, list[int]]]) -> dict[str, torch.Tensor]:
        sides = ("chosen", "rejected")
        ids = [torch.tensor(pair[f"{side}_ids"]) for side in sides for pair in pairs]
        masks = [torch.tensor(pair[f"{side}_mask"]) for side in sides for pair in pairs]
        there = [torch.ones_like(row) for row in ids]
        return {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=self._padding),
            "attention_mask": pad_sequence(there, batch_first=True),
            "completion_mask": pad_sequence(masks, batch_first=True),
        }


class _Recorder(TrainerCallback):
    """Takes each step down from what TRL logs of it."""

    def __init__(self, record: RunRecord, units: Sequence[Unit], parts: Parts, *, passes: int) -> None:
        """``passes`` is how often a step computes its tokens forward."""
        self._record = record
        self._units = units
        self._parts = parts
        self._passes = passes
        self._number = record.resumed_at

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """After each step, and once at the end."""
        del args, state, control
        if "loss" not in logs:
            return
        loss, norm = float(logs["loss"]), float(logs["grad_norm"])
        self._record.require_finite(loss, norm)
        batch = [self._units[index] for index in self._record.remaining[0].members]
        figures = {name: float(logs[key]) for key, name in _FIGURES.items() if key in logs}
        figures["length"] = mean_length([sequence for unit in batch for sequence in unit])
        nodes = self._passes * self._parts.tokens_of_step(self._number)
        self._number += 1
        made = StepFigures(loss=loss, nodes=nodes, figures=figures)
        self._record.add(batch, made, norm=norm, rate=float(logs["learning_rate"]))


def _labelled(unit: Unit) -> dict[str, list[int]]:
    (sequence,) = unit
    ids, mask = _computed(sequence)
    labels = [token if trained else _IGNORED for token, trained in zip(ids, mask, strict=True)]
    return {"input_ids": ids, "labels": labels}


def _compared(unit: Unit) -> dict[str, list[int]]:
    (chosen, chosen_mask), (rejected, rejected_mask) = (_computed(sequence) for sequence in unit)
    return {
        "chosen_ids": chosen, "chosen_mask": chosen_mask, "rejected_ids": rejected, "rejected_mask": rejected_mask,
    }  # fmt: skip


def _computed(sequence: TrainingSequence) -> tuple[list[int], list[int]]:
    """Tokens and mask up to the last trained token."""
    end = sequence.input_length + 1
    return list(sequence.token_ids[:end]), list(sequence.loss_mask[:end])


@contextmanager
def _without_dropout(trained: LoraModel) -> Generator[None]:
    """The model computes without dropout inside the block, although TRL trains in training mode.

    Recorded answers were sampled without it, and nothing may be drawn that the seed does not decide.
    """

    def before(*_: object) -> None:
        compute_without_dropout(trained.base)

    hook = trained.model.base_model.register_forward_pre_hook(before)
    try:
        yield
    finally:
        hook.remove()
        compute_without_dropout(trained.base)


@contextmanager
def _own_adapter_only(trained: LoraModel) -> Generator[None]:
    """DPOTrainer adds a second adapter, its reference; after the block it is gone.

    Raises:
        TrainingError: other parameters are trainable than before.
    """
    before = trained.trainable_parameters
    yield
    if _REFERENCE in trained.model.peft_config:
        trained.model.delete_adapter(_REFERENCE)
    if trained.trainable_parameters != before:
        raise TrainingError(
            f"TRL left {trained.trainable_parameters} trainable parameters of {before}; set training.backend = 'own'"
        )

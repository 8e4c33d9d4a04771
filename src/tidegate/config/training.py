"""Settings of the LoRA step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tidegate.config.fields import Finite, Fraction, Positive, Section

_OBJECTIVES_OF_TRL = ("sft", "dpo")


class TrainingSettings(Section):
    """The LoRA step."""

    backend: Literal["own", "trl"] = Field(
        default="own",
        description="Who computes the updates: Tidegate's own step, or TRL's SFTTrainer and DPOTrainer on the same "
        "sequences ('trl'; objectives 'sft' and 'dpo', the extra 'trl').",
    )
    objective: Literal["sft", "grpo", "reinforce", "gspo", "cispo", "dpo", "kto"] = Field(
        default="sft",
        description="'sft': likelihood of verified answers; 'grpo' (PPO's clipped ratio), 'reinforce' (no clip: one "
        "epoch), 'gspo', 'cispo': rewards of all answers; 'dpo', 'kto': right against wrong answers.",
    )
    baseline: Literal["group", "leave_one_out", "slice", "batch"] = Field(
        default="group",
        description="What a reward is compared with: the other answers to the same prompt ('group', 'leave_one_out'), "
        "earlier answers of the same kind ('slice', for traffic with one answer a prompt), or all of the batch.",
    )
    reward_scale: Literal["group", "batch", "none"] = Field(
        default="group",
        description="Standard deviation that advantages of baseline 'group' are divided by; no other baseline has one.",
    )
    slice_half_life: Finite = Field(
        default=50.0, gt=0, description="Answers of a kind after which a reward counts half in the 'slice' baseline."
    )
    aggregate: Literal["token", "sequence", "dr_grpo"] = Field(
        default="token",
        description="What the policy loss is a mean over: trained tokens, sequences, or max_completion tokens for each "
        "sequence ('dr_grpo').",
    )
    max_completion: Positive = Field(
        default=512, description="Constant that 'dr_grpo' divides by: the longest completion that may be generated."
    )
    clip_low: Finite | None = Field(
        default=None,
        ge=0,
        le=1,
        description="A ratio counts down to 1 - clip_low; default: 0.2 for 'grpo', 3e-4 for 'gspo', 1 for 'cispo'; no "
        "other objective clips.",
    )
    clip_high: Finite | None = Field(
        default=None,
        ge=0,
        description="A ratio counts up to 1 + clip_high; default: 0.2 for 'grpo', 4e-4 for 'gspo', 4 for 'cispo'.",
    )
    importance_cap: Finite = Field(
        default=3.0,
        ge=0,
        description="Truncation of the weights that make up for answers sampled from other weights; 0 turns them off.",
    )
    kl_coefficient: Finite = Field(
        default=0.0,
        ge=0,
        description="Weight of the divergence from the weights that training starts from; 'dpo' and 'kto' hold to them "
        "by preference_beta instead.",
    )
    preference_beta: Finite = Field(default=0.1, gt=0, description="Beta of 'dpo' and 'kto'.")
    restart: Literal["champion", "base"] = Field(
        default="champion", description="Weights that a challenger starts from."
    )
    averaging: tuple[Annotated[float, Field(gt=0.0, lt=1.0)], ...] = Field(
        default=(),
        description="Shares of the way from the champion to the challenger that are tried on dev tasks beside the "
        "whole; what solves most is proposed. Empty proposes the challenger; needs restart = 'champion'.",
    )
    rank: Positive = Field(default=16, description="Rank of the LoRA matrices.")
    alpha: Positive = Field(default=32, description="LoRA scale; the update is multiplied by alpha / rank.")
    learning_rate: Finite = Field(default=5e-4, gt=0, description="Peak learning rate of AdamW.")
    epochs: Positive = Field(default=2, description="Passes over the batch.")
    batch_size: Positive = Field(default=8, description="Sequences per optimizer step.")
    max_grad_norm: Finite = Field(default=1.0, gt=0, description="Gradients are scaled down to this norm.")
    warmup_fraction: Fraction = Field(default=0.1, description="Share of the steps over which the rate rises.")
    weight_decay: Finite = Field(default=0.0, ge=0, description="AdamW's decoupled weight decay.")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Of the base weights while training.")
    max_length: Positive = Field(default=2048, description="Longer sequences are dropped and counted.")
    max_tokens_at_once: Positive = Field(
        default=1024, description="Tokens that one forward and backward pass computes; memory grows with it."
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Compute layers again in the backward pass: less memory, more time."
    )
    checkpoint_steps: int = Field(
        default=50, ge=0, description="Steps between checkpoints from which a killed run goes on; 0 writes none."
    )
    timeout_s: Finite = Field(default=3600.0, gt=0, description="A training run that takes longer is ended and fails.")
    seed: int = Field(default=0, ge=0, description="Seed of initialisation and order; same seed, same adapter hash.")

    @model_validator(mode="after")
    def _take_effect(self) -> TrainingSettings:
        """Refuse what the objective would silently ignore."""
        if self.averaging and self.restart != "champion":
            raise ValueError(
                f"averaging = {list(self.averaging)!r} with restart = {self.restart!r}: the way from the champion to "
                "the challenger needs restart = 'champion'"
            )
        for other, settings in _READ_WITH.items():
            chosen = getattr(self, other)
            for name, readers in settings.items():
                value, default = getattr(self, name), type(self).model_fields[name].default
                if value != default and chosen not in readers:
                    raise ValueError(
                        f"{name} = {value!r} has no effect on {other} = {chosen!r}; leave it out, or set {other} to "
                        f"{' or '.join(map(repr, readers))}"
                    )
        if self.backend == "trl":
            self._require_trl()
        return self

    def _require_trl(self) -> None:
        """Refuse what TRL's trainers do not do with recorded sequences."""
        if self.objective not in _OBJECTIVES_OF_TRL:
            raise ValueError(
                f"objective = {self.objective!r} with backend = 'trl': its trainers learn from recorded answers by "
                "'sft' and 'dpo' only, those of policy objectives sample answers of their own; choose one of these, or "
                "backend = 'own'"
            )
        if self.kl_coefficient > 0:
            raise ValueError(
                f"kl_coefficient = {self.kl_coefficient:g} with backend = 'trl': its SFT knows no divergence from the "
                "start; leave it 0, or set backend = 'own'"
            )


_POLICY = ("grpo", "reinforce", "gspo", "cispo")
_READ_WITH: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "objective": {
        "baseline": _POLICY,
        "reward_scale": _POLICY,
        "slice_half_life": _POLICY,
        "aggregate": _POLICY,
        "max_completion": _POLICY,
        "clip_low": ("grpo", "gspo", "cispo"),
        "clip_high": ("grpo", "gspo", "cispo"),
        "importance_cap": _POLICY,
        "kl_coefficient": ("sft", *_POLICY),
        "preference_beta": ("dpo", "kto"),
    },
    "baseline": {"reward_scale": ("group",), "slice_half_life": ("slice",)},
    "aggregate": {"max_completion": ("dr_grpo",)},
}
"""By the setting that decides it: with which of its values another one is read at all."""

_OF_OTHER_OBJECTIVES = {name for name, readers in _READ_WITH["objective"].items() if "sft" not in readers}


def supervised(settings: TrainingSettings) -> TrainingSettings:
    """The same settings with ``sft`` as the objective, and the defaults of what only others read."""
    kept = settings.model_dump(exclude={"objective", *_OF_OTHER_OBJECTIVES})
    return TrainingSettings(objective="sft", **kept)

"""The embedded engine on the real 135M model, as the composition root wires it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from engine_fixtures import answer, call, lora_for, write_adapter
from tidegate.engines.embedded import EmbeddedEngine
from tidegate.engines.model_cache import resolve_model

pytestmark = [pytest.mark.model, pytest.mark.slow]


async def test_the_default_model_answers_with_and_without_an_adapter(tmp_path: Path) -> None:
    model_dir = resolve_model("smollm2-135m")
    with safe_open(model_dir / "model.safetensors", framework="pt") as weights:
        shapes = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    targets = ["q_proj", "o_proj", "up_proj"]
    ref = write_adapter(
        tmp_path / "cand-00000001",
        model_dir,
        tensors=lora_for(shapes, targets, seed=1, size=0.02),
        config={"target_modules": targets},
    )
    async with EmbeddedEngine(model_dir) as engine:
        prompt, (choice,) = await answer(engine, call("What is the capital of France?", max_tokens=16))
        assert "Paris" in choice.text
        city = {"city": {"enum": ["Paris", "Rome"]}}
        schema = json.dumps({"type": "object", "properties": city, "required": ["city"], "additionalProperties": False})
        question = call("Is Paris or Rome the capital of France?", max_tokens=40, json_schema=schema)
        _, (choice,) = await answer(engine, question)
        assert json.loads(choice.text)["city"] in ("Paris", "Rome")
        await engine.load(ref)
        probe = await engine.probe(ref.name, against=None, prompts=[({"role": "user", "content": "Hello"},)])
        assert probe.sha256 == ref.sha256
        assert probe.max_logit_difference > 0.01
        requests = [
            call(f"Count to {index}.", max_tokens=12, temperature=1.0, seed=index, adapter=[None, ref.name][index % 2])
            for index in range(8)
        ]
        tolerance = 1e-3 if lane_dtype(engine) is torch.float32 else 0.3
        for request, (prompt, (choice,)) in zip(
            requests, await asyncio.gather(*(answer(engine, request) for request in requests)), strict=True
        ):
            fresh = await engine.sequence_logprobs(request.adapter, prompt + choice.token_ids)
            assert choice.logprobs == pytest.approx(fresh[len(prompt) - 1 :], abs=tolerance)


def lane_dtype(engine: EmbeddedEngine) -> torch.dtype:
    assert engine._state is not None
    return engine._state.base.shape.dtype

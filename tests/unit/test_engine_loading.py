"""Loading a base: attention patterns that slots must reproduce, architectures that are refused, end tokens."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine_fixtures import answer, byte_tokenizer, call, running, write_tiny_model
from tidegate.core.errors import ModelError
from tidegate.engines.embedded.loading import choose_dtype, end_token_ids, load_base

SMALL: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.4,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
ALTERNATING = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
ARCHITECTURES: dict[str, Any] = {
    "mistral with a window": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=24)),
    "qwen3 alternating": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, use_sliding_window=True, **ALTERNATING)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL)),
    "gemma3 alternating": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SMALL, **ALTERNATING)),
}


def write(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ARCHITECTURES)
async def test_attention_patterns_are_those_of_the_model_beyond_the_window(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    folder = write(tmp_path / "m", ARCHITECTURES[name]())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    async with running(folder) as engine:
        requests = [call("w" * length, max_tokens=30, temperature=1.0, seed=length) for length in (3, 60, 100)]
        for prompt, (choice,) in await asyncio.gather(*(answer(engine, request) for request in requests)):
            ids = [*prompt, *choice.token_ids]
            with torch.no_grad():
                scores = torch.log_softmax(model(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1], -1)
            expected = scores.gather(1, torch.tensor(choice.token_ids)[:, None])[:, 0].tolist()
            assert choice.logprobs == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (
            lambda: MambaForCausalLM(MambaConfig(vocab_size=259, hidden_size=32, num_hidden_layers=1)),
            "MambaForCausalLM",
        ),
        (
            lambda: BloomForCausalLM(BloomConfig(vocab_size=259, hidden_size=32, n_layer=1, n_head=4)),
            "BloomForCausalLM",
        ),
    ],
)
def test_architectures_that_slots_do_not_reproduce_are_refused_by_name(model: Any, name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    with pytest.raises(ModelError, match=f"architecture '{name}'.*external engine"):
        load_base(write(tmp_path / "m", model()), torch.float32)


def test_hybrid_layers_are_refused_before_the_weights_are_read(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    layers = {"model_type": "qwen3", "layer_types": ["linear_attention", "full_attention"]}
    (folder / "config.json").write_text(json.dumps({**config, **layers}))
    with pytest.raises(ModelError, match="linear_attention"):
        load_base(folder, torch.float32)


@pytest.mark.parametrize("content", ["{", '{"model_type": "no-such-model"}', "[]"])
def test_a_damaged_configuration_is_refused(content: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_base(folder, torch.float32)


def test_code_in_a_model_directory_is_not_run(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    auto = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (folder / "config.json").write_text(json.dumps({**config, **auto}))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_base(folder, torch.float32)
    assert not (tmp_path / "ran").exists()


def test_end_tokens_come_from_every_place_that_names_one(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", eos_token_id=7)
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": [5, 6]}))
    assert load_base(folder, torch.float32).end_ids == {2, 5, 6, 7}


def test_a_turn_end_that_only_the_template_names_ends_an_answer() -> None:
    class Nothing:
        eos_token_id = None
        generation_config = None

        @property
        def config(self) -> Nothing:
            return self

        def get_text_config(self, **_: bool) -> Nothing:
            return self

    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    assert end_token_ids(Nothing(), tokenizer) == {2}


def test_auto_is_bfloat16_only_where_the_processor_has_it() -> None:
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    assert choose_dtype("auto") is (torch.bfloat16 if native else torch.float32)
    assert choose_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(ModelError, match=r"model\.dtype = 'half' is unknown"):
        choose_dtype("half")


async def test_bfloat16_serves_too(tmp_path: Path) -> None:
    async with running(write_tiny_model(tmp_path / "m"), dtype="bfloat16") as engine:
        prompt, (choice,) = await answer(engine, call("x", max_tokens=8))
        fresh = await engine.sequence_logprobs(None, prompt + choice.token_ids)
        assert choice.logprobs == pytest.approx(fresh[len(prompt) - 1 :], abs=0.25)


def test_importing_the_package_imports_no_torch() -> None:
    code = (
        "import sys, tidegate.engines.embedded, tidegate.engines.model_cache;"
        "assert not {'torch', 'transformers', 'peft'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

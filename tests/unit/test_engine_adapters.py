"""Adapters: merged exactly, refused when anything is off, several at once, evicted and unloaded safely."""

from __future__ import annotations

import asyncio
import itertools
import json
import pickle
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from engine_fixtures import (
    LONGEST,
    answer,
    byte_tokenizer,
    call,
    lane_of,
    lora_tensors,
    running,
    write_adapter,
    write_tiny_model,
)
from tidegate.artifacts import CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE, adapter_hash
from tidegate.core.chat import encode_prompt
from tidegate.core.errors import AdapterError, EngineBusyError, EngineError, RequestError
from tidegate.core.types import AdapterRef, TokenDelta
from tidegate.engines.embedded.engine import EmbeddedEngine

PROMPTS = tuple(({"role": "user", "content": text},) for text in ("one", "a longer one"))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def engine(model_dir: Path) -> AsyncGenerator[EmbeddedEngine]:
    async with running(model_dir) as started:
        yield started


async def names(engine: EmbeddedEngine) -> list[str]:
    return [ref.name for ref in await engine.list_adapters()]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # inside peft
@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"lora_alpha": 3}])
async def test_a_merged_adapter_computes_what_peft_computes(
    engine: EmbeddedEngine, model_dir: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    ref = write_adapter(tmp_path / "a", model_dir, config=options)
    await engine.load(ref)
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    peft = PeftModel.from_pretrained(base, tmp_path / "a").eval()
    ids = encode_prompt(byte_tokenizer(), PROMPTS[1], ())
    with torch.no_grad():
        expected = torch.log_softmax(peft(torch.tensor([ids])).logits[0, :-1], -1)
    expected = expected.gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist()
    assert await engine.sequence_logprobs("a", ids) == pytest.approx(expected, abs=1e-4)
    assert await engine.sequence_logprobs(None, ids) != pytest.approx(expected, abs=1e-2)


async def test_the_log_probabilities_of_an_answer_are_the_tail_of_the_sequences(engine: EmbeddedEngine) -> None:
    ids = encode_prompt(byte_tokenizer(), PROMPTS[1], ())
    whole = await engine.sequence_logprobs(None, ids)
    assert len(whole) == len(ids) - 1
    for first in (1, 2, len(ids) - 1):
        assert await engine.sequence_logprobs(None, ids, first=first) == pytest.approx(whole[first - 1 :], abs=1e-5)


@pytest.mark.parametrize(("length", "first"), [(3, 0), (3, 3), (1, 1), (0, 1)])
async def test_a_token_without_any_before_it_has_no_log_probability(
    engine: EmbeddedEngine, length: int, first: int
) -> None:
    with pytest.raises(RequestError, match=f"first is {first} of {length} tokens"):
        await engine.sequence_logprobs(None, [5] * length, first=first)


async def test_a_sequence_longer_than_the_context_has_no_log_probabilities(engine: EmbeddedEngine) -> None:
    with pytest.raises(RequestError, match=f"has {LONGEST} tokens"):
        await engine.sequence_logprobs(None, [5] * (LONGEST + 1))


async def test_an_adapter_that_is_not_loaded_has_no_log_probabilities(engine: EmbeddedEngine) -> None:
    with pytest.raises(AdapterError, match="gone"):
        await engine.sequence_logprobs("gone", [5, 6, 7])


async def test_untouched_tensors_are_shared_with_the_base(
    engine: EmbeddedEngine, model_dir: Path, tmp_path: Path
) -> None:
    await engine.load(write_adapter(tmp_path / "a", model_dir))
    base, merged = lane_of(engine).runner.model, lane_of(engine, "a").runner.model
    own = {name for name, tensor in merged.named_parameters() if tensor.data_ptr() not in pointers(base)}
    assert own == {f"model.layers.{layer}.{name}.weight" for layer in range(2) for name in ADAPTED}
    assert merged.lm_head.weight is base.model.embed_tokens.weight


ADAPTED = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")


def pointers(model: Any) -> set[int]:
    return {tensor.data_ptr() for tensor in model.parameters()}


async def test_base_and_adapters_answer_side_by_side_each_as_alone(
    engine: EmbeddedEngine, model_dir: Path, tmp_path: Path
) -> None:
    for index in range(3):
        await engine.load(write_adapter(tmp_path / f"a{index}", model_dir, seed=index))
    requests = [call(f"q{i}", max_tokens=12, adapter=[None, "a0", "a1", "a2"][i % 4]) for i in range(16)]
    alone = [(await answer(engine, request))[1][0].token_ids for request in requests]
    mixed = await asyncio.gather(*(answer(engine, request) for request in requests))
    assert [choices[0].token_ids for _, choices in mixed] == alone
    same_prompt = [(await answer(engine, call("q", adapter=name)))[1][0].token_ids for name in (None, "a0", "a1")]
    assert len(set(same_prompt)) == 3


async def test_a_prefix_computed_under_one_adapter_is_not_used_under_another(
    engine: EmbeddedEngine, model_dir: Path, tmp_path: Path
) -> None:
    await engine.load(write_adapter(tmp_path / "a", model_dir))
    request = call("a long shared beginning of a prompt " * 3, adapter="a")
    async with running(model_dir, prefix_cache_tokens=0) as plain:
        await plain.load(AdapterRef(name="a", path=tmp_path / "a", sha256=(await engine.list_adapters())[0].sha256))
        expected = (await answer(plain, request))[1][0].logprobs
    await answer(engine, call("a long shared beginning of a prompt " * 3))
    assert (await answer(engine, request))[1][0].logprobs == pytest.approx(expected, abs=1e-4)


async def test_the_same_adapter_again_is_a_no_op_and_other_content_is_refused(
    engine: EmbeddedEngine, model_dir: Path, tmp_path: Path
) -> None:
    ref = write_adapter(tmp_path / "a", model_dir)
    await asyncio.gather(engine.load(ref), engine.load(ref))
    lane = lane_of(engine, "a")
    await engine.load(ref)
    assert lane_of(engine, "a") is lane
    assert await engine.list_adapters() == (ref,)
    other = write_adapter(tmp_path / "b", model_dir, name="a", seed=9)
    with pytest.raises(AdapterError, match=f"'a' is taken by content {ref.sha256}, not {other.sha256}"):
        await engine.load(other)


async def test_a_probe_proves_hash_and_effect(engine: EmbeddedEngine, model_dir: Path, tmp_path: Path) -> None:
    ref = write_adapter(tmp_path / "a", model_dir)
    silent = write_adapter(
        tmp_path / "zero", model_dir, tensors={k: v * (".lora_A." in k) for k, v in lora_tensors(1).items()}
    )
    await engine.load(ref)
    await engine.load(silent)
    result = await engine.probe("a", against=None, prompts=PROMPTS)
    assert (result.name, result.sha256) == ("a", ref.sha256)
    assert result.max_logit_difference > 0.1
    assert (await engine.probe("zero", against=None, prompts=PROMPTS)).max_logit_difference == 0.0
    against = await engine.probe("a", against="zero", prompts=PROMPTS)
    assert against.max_logit_difference == pytest.approx(result.max_logit_difference, abs=1e-5)
    with pytest.raises(AdapterError, match="'b' is not loaded"):
        await engine.probe("b", against=None, prompts=PROMPTS)
    with pytest.raises(AdapterError, match="'b' is not loaded"):
        await engine.probe("a", against="b", prompts=PROMPTS)
    with pytest.raises(RequestError, match="at least one prompt"):
        await engine.probe("a", against=None, prompts=())


async def test_an_adapter_that_is_not_loaded_is_refused_by_name(engine: EmbeddedEngine) -> None:
    with pytest.raises(AdapterError, match=r"'ghost' is not loaded; loaded are \[\]"):
        await answer(engine, call(adapter="ghost"))
    await engine.unload("ghost")


async def test_unloading_waits_for_running_requests_and_refuses_new_ones(
    engine: EmbeddedEngine, model_dir: Path, tmp_path: Path
) -> None:
    ref = write_adapter(tmp_path / "a", model_dir)
    await engine.load(ref)
    stream = engine.generate(call("x", adapter="a", max_tokens=30, temperature=1.0, seed=1))
    await anext(stream)
    unloading = asyncio.create_task(engine.unload("a"))
    await asyncio.sleep(0)
    assert await names(engine) == []
    with pytest.raises(AdapterError, match="not loaded"):
        await answer(engine, call(adapter="a"))
    assert not unloading.done()
    rest = [event async for event in stream]
    assert sum(isinstance(event, TokenDelta) for event in rest) >= 1
    await unloading
    assert "a" not in engine._state.residents._table  # type: ignore[union-attr]
    await engine.load(ref)
    assert await names(engine) == ["a"]


async def test_loading_again_while_it_is_being_unloaded_keeps_it(
    engine: EmbeddedEngine, model_dir: Path, tmp_path: Path
) -> None:
    ref = write_adapter(tmp_path / "a", model_dir)
    await engine.load(ref)
    stream = engine.generate(call("x", adapter="a", max_tokens=1500, temperature=1.0))
    await anext(stream)
    unloading = asyncio.create_task(engine.unload("a"))
    await asyncio.sleep(0)
    await engine.load(ref)
    await unloading
    assert await names(engine) == ["a"]
    await stream.aclose()
    await engine.unload("a")
    assert await names(engine) == []


async def test_the_least_recently_used_copy_makes_room_and_comes_back_without_its_files(
    model_dir: Path, tmp_path: Path
) -> None:
    async with running(model_dir, max_resident_adapters=2) as engine:
        for name in ("a", "b"):
            await engine.load(write_adapter(tmp_path / name, model_dir, seed=ord(name)))
        before = (await answer(engine, call(adapter="b")))[1][0]
        await answer(engine, call(adapter="a"))
        await engine.load(write_adapter(tmp_path / "c", model_dir, seed=3))
        assert lane_of(engine, "b") is None
        assert lane_of(engine, "a") is not None
        assert await names(engine) == ["a", "b", "c"]
        for file in (tmp_path / "b").iterdir():
            file.unlink()
        again = (await answer(engine, call(adapter="b")))[1][0]
        assert again.token_ids == before.token_ids
        assert sum(lane_of(engine, name) is not None for name in ("a", "b", "c")) == 2


async def test_a_copy_in_use_is_never_evicted(model_dir: Path, tmp_path: Path) -> None:
    async with running(model_dir, max_resident_adapters=1) as engine:
        await engine.load(write_adapter(tmp_path / "a", model_dir))
        stream = engine.generate(call("x", adapter="a", max_tokens=1500, temperature=1.0))
        await anext(stream)
        other = write_adapter(tmp_path / "b", model_dir, seed=2)
        with pytest.raises(EngineBusyError, match=r"'b' needs room, but all 1 resident adapters \['a'\] are in use"):
            await engine.load(other)
        assert await names(engine) == ["a"]
        await stream.aclose()
        await engine.load(other)
        assert (await answer(engine, call(adapter="a")))[1][0].token_ids


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
async def test_an_adapter_without_memory_for_its_copy_is_refused_and_the_rest_goes_on(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def without_memory(*_: object) -> Any:
        raise error

    async with running(model_dir) as engine:
        await engine.load(write_adapter(tmp_path / "a", model_dir))
        ref = write_adapter(tmp_path / "b", model_dir, seed=2)
        with monkeypatch.context() as patch:
            patch.setattr("tidegate.engines.embedded.engine.merged_model", without_memory)
            with pytest.raises(EngineError, match=r"'b' could not be merged .*model.max_resident_adapters"):
                await engine.load(ref)
        assert await names(engine) == ["a"]
        assert (await answer(engine, call(adapter="a")))[1][0].token_ids
        await engine.load(ref)
        assert await names(engine) == ["a", "b"]


async def test_swapping_under_load_fails_no_request(engine: EmbeddedEngine, model_dir: Path, tmp_path: Path) -> None:
    refs = [write_adapter(tmp_path / f"r{index}", model_dir, seed=index) for index in range(3)]
    await engine.load(refs[0])
    champion = refs[0].name
    answered: list[str] = []

    async def user(index: int) -> None:
        for turn in range(6):
            name = champion
            await answer(engine, call(f"{index} {turn}", adapter=name, temperature=1.0, max_tokens=8))
            answered.append(name)

    users = [asyncio.create_task(user(index)) for index in range(6)]
    for old, new in itertools.pairwise(refs):
        await engine.load(new)
        champion = new.name
        await engine.unload(old.name)
    await asyncio.gather(*users)
    assert len(answered) == 36
    assert answered[-1] == "r2"


def rename_tensor(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.layers.0.mlp.down_proj.lora_magnitude"] = torch.ones(2)


def drop_half(tensors: dict[str, torch.Tensor]) -> None:
    tensors.pop("base_model.model.model.layers.1.mlp.down_proj.lora_B.weight")


def drop_module(tensors: dict[str, torch.Tensor]) -> None:
    for half in "AB":
        tensors.pop(f"base_model.model.model.layers.1.mlp.down_proj.lora_{half}.weight")


def add_module(tensors: dict[str, torch.Tensor]) -> None:
    for half in "AB":
        stem = "base_model.model.model.layers.{}.mlp.down_proj.lora_" + half + ".weight"
        tensors[stem.format(2)] = tensors[stem.format(0)].clone()


def wrong_rank(tensors: dict[str, torch.Tensor]) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    tensors[name] = tensors[name][:2].clone()


def wrong_width(tensors: dict[str, torch.Tensor]) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    tensors[name] = torch.ones(40, 4)


def infinite(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"][0, 0] = float("inf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rename_tensor, "holds tensor '.*lora_magnitude'"),
        (drop_half, r"lacks one of A and B for modules \['model.layers.1.mlp.down_proj'\]"),
        (drop_module, r"missing: \['model.layers.1.mlp.down_proj'\]"),
        (add_module, r"not there: \['model.layers.2.mlp.down_proj'\]"),
        (wrong_rank, r"'model.layers.0.self_attn.q_proj' has A and B of shapes \(\(2, 32\)"),
        (wrong_width, r"shapes \(\(4, 32\), \(40, 4\)\), expected \(\(4, 32\), \(32, 4\)\)"),
        (infinite, "q_proj.lora_B.weight' .* holds NaN, infinity"),
    ],
)
async def test_tensors_that_do_not_fit_are_refused(
    engine: EmbeddedEngine,
    model_dir: Path,
    tmp_path: Path,
    change: Callable[[dict[str, torch.Tensor]], None],
    message: str,
) -> None:
    tensors = lora_tensors(1)
    change(tensors)
    ref = write_adapter(tmp_path / "bad", model_dir, tensors=tensors)
    with pytest.raises(AdapterError, match=message):
        await engine.load(ref)
    assert await names(engine) == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"use_dora": True}, "uses {'use_dora': True}"),
        ({"bias": "all"}, "uses {'bias': 'all'}"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"r": 0}, "r = 0"),
        ({"r": 8}, r"expected \(\(8, 48\)"),
        ({"lora_alpha": None}, "lora_alpha = None"),
        ({"target_modules": []}, r"target_modules \[\]"),
        ({"target_modules": ["q_proj"]}, "not there: .*down_proj"),
    ],
)
async def test_configurations_that_cannot_be_served_are_refused(
    engine: EmbeddedEngine, model_dir: Path, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    ref = write_adapter(tmp_path / "bad", model_dir, config=config)
    with pytest.raises(AdapterError, match=message):
        await engine.load(ref)


async def test_another_base_and_another_hash_are_refused(
    engine: EmbeddedEngine, model_dir: Path, tmp_path: Path
) -> None:
    foreign = write_adapter(tmp_path / "foreign", model_dir, base_sha256="0" * 64)
    with pytest.raises(AdapterError, match=f"trained on base {'0' * 64}, this engine serves base {engine.base_sha256}"):
        await engine.load(foreign)
    ref = write_adapter(tmp_path / "a", model_dir)
    save_file(lora_tensors(2), tmp_path / "a" / WEIGHTS_FILE)
    with pytest.raises(AdapterError, match=f"hashes to [0-9a-f]{{64}}, expected {ref.sha256}"):
        await engine.load(ref)


async def test_changed_options_and_manifests_are_refused(
    engine: EmbeddedEngine, model_dir: Path, tmp_path: Path
) -> None:
    ref = write_adapter(tmp_path / "a", model_dir)
    config = json.loads((tmp_path / "a" / CONFIG_FILE).read_text())
    (tmp_path / "a" / CONFIG_FILE).write_text(json.dumps({**config, "lora_alpha": 64}))
    with pytest.raises(AdapterError, match="hashes to"):
        await engine.load(ref)
    (tmp_path / "a" / CONFIG_FILE).write_text("[1]")
    with pytest.raises(AdapterError, match="holds list"):
        await engine.load(ref)
    (tmp_path / "a" / CONFIG_FILE).write_text('{"lora_alpha": NaN}')
    with pytest.raises(AdapterError, match="cannot be hashed"):
        await engine.load(ref)
    (tmp_path / "a" / MANIFEST_FILE).write_text("{}")
    with pytest.raises(AdapterError, match="names no base_sha256"):
        await engine.load(ref)
    (tmp_path / "a" / MANIFEST_FILE).unlink()
    with pytest.raises(AdapterError, match=f"{MANIFEST_FILE} is unreadable"):
        await engine.load(ref)


async def test_pickle_weights_and_truncated_files_are_refused(
    engine: EmbeddedEngine, model_dir: Path, tmp_path: Path
) -> None:
    ref = write_adapter(tmp_path / "a", model_dir)
    weights = tmp_path / "a" / WEIGHTS_FILE
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(AdapterError, match="hashes to"):
        await engine.load(ref)
    weights.unlink()
    (tmp_path / "a" / "adapter_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(AdapterError, match=r"no readable adapter_model.safetensors \(found: .*adapter_model.bin"):
        await engine.load(ref)
    garbage = write_adapter(tmp_path / "b", model_dir)
    (tmp_path / "b" / WEIGHTS_FILE).write_bytes(b"not safetensors")
    hashed = AdapterRef(name="b", path=garbage.path, sha256=adapter_hash(garbage.path))
    with pytest.raises(AdapterError, match="cannot be read"):
        await engine.load(hashed)

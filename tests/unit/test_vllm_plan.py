"""How vLLM is started: what the settings become, who gets which device, and what it must not get."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tidegate.app.supervision import vllm_options
from tidegate.artifacts import CONFIG_FILE
from tidegate.config import Settings
from tidegate.config.engine import EngineSettings
from tidegate.core.errors import ConfigError, ModelError
from tidegate.engines.supervised import VllmOptions, visible_gpus, vllm_plans
from tidegate.engines.supervised.supervisor import Patience

OPTIONS = VllmOptions(
    python=Path("/envs/vllm/bin/python"),
    model_dir=Path("/models/m"),
    served_name="m",
    max_rank=16,
    resident=4,
    max_context=2048,
    max_running=32,
    dtype="bfloat16",
    raw_logprobs=True,
)


def arguments(options: VllmOptions) -> dict[str, str]:
    """Values by flag; those without one are ''."""
    (plan,) = vllm_plans(options, prefix="vllm", replicas=1, gpus=(), environment={})
    command = list(plan.command(Path("/run/s")))
    assert command[:3] == ["/envs/vllm/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    found: dict[str, str] = {}
    for at, word in enumerate(command[3:], start=3):
        if word.startswith("--"):
            value = command[at + 1] if at + 1 < len(command) else ""
            found[word] = "" if value.startswith("--") else value
    return found


def test_the_settings_become_arguments() -> None:
    found = arguments(OPTIONS)
    assert found["--model"] == "/models/m"
    assert (found["--uds"], found["--served-model-name"]) == ("/run/s", "m")
    assert not {"--host", "--port", "--api-key"} & set(found)
    assert (found["--max-loras"], found["--max-cpu-loras"]) == ("4", "8")
    assert (found["--max-model-len"], found["--max-num-seqs"], found["--dtype"]) == ("2048", "32", "bfloat16")
    assert found["--logprobs-mode"] == "raw_logprobs"
    assert "--enable-lora" in found
    assert arguments(replace(OPTIONS, raw_logprobs=False))["--logprobs-mode"] == "processed_logprobs"


@pytest.mark.parametrize("logprobs", [None, "raw", "processed"])
def test_the_server_is_started_in_the_mode_that_its_answers_are_read_in(tmp_path: Path, logprobs: Any) -> None:
    engine = EngineSettings(kind="vllm", model="m", logprobs=logprobs)
    options = vllm_options(Settings(data_dir=tmp_path, engine=engine), OPTIONS.python, Path("/models/m"))
    mode = arguments(options)["--logprobs-mode"]
    assert mode == ("raw_logprobs" if engine.raw_logprobs else "processed_logprobs")
    assert engine.raw_logprobs is (logprobs != "processed")


def test_no_adapter_that_was_ever_made_here_is_of_too_high_a_rank(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, engine=EngineSettings(kind="vllm", model="m"))
    for name, fields in (("a", {"r": 8}), ("b", {"r": 4, "rank_pattern": {"q_proj": 64}}), ("c", {"r": "x"})):
        (tmp_path / "adapters" / name).mkdir(parents=True)
        (tmp_path / "adapters" / name / CONFIG_FILE).write_text(json.dumps(fields))
    (tmp_path / "adapters" / "d").mkdir()
    (tmp_path / "adapters" / "d" / CONFIG_FILE).write_text("no JSON")
    assert vllm_options(settings, Path("/python"), Path("/models/m")).max_rank == 64
    assert settings.training.rank < 64


def weights(folder: Path, *names: str) -> None:
    header = {name: {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]} for name in names}
    body = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(body).to_bytes(8, "little") + body + bytes(4))


def started_with(folder: Path) -> list[str]:
    (plan,) = vllm_plans(replace(OPTIONS, model_dir=folder), prefix="vllm", replicas=1, gpus=(), environment={})
    return list(plan.command(Path("/run/s")))


def test_the_output_layer_takes_no_adapter(tmp_path: Path) -> None:
    layer = "model.layers.0.self_attn"
    weights(tmp_path, "lm_head.weight", "model.embed_tokens.weight", f"{layer}.q_proj.weight", f"{layer}.v_proj.weight")
    command = started_with(tmp_path)
    at = command.index("--lora-target-modules")
    assert command[at + 1 : at + 4] == ["q_proj", "v_proj"]


@pytest.mark.parametrize("name", ["model.layers.0.attn.c_attn.weight", "model.layers.0.experts.0.w1.weight"])
def test_a_model_with_modules_that_we_cannot_name_is_left_to_vllm(tmp_path: Path, name: str) -> None:
    weights(tmp_path, name, "model.layers.0.self_attn.q_proj.weight")
    assert "--lora-target-modules" not in started_with(tmp_path)


def test_damaged_weights_are_refused_before_a_server_is_started(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ModelError, match="damaged or truncated"):
        started_with(tmp_path)


def test_a_users_arguments_come_last() -> None:
    (plan,) = vllm_plans(
        replace(OPTIONS, arguments=("--max-loras", "2")), prefix="v", replicas=1, gpus=(), environment={}
    )
    assert list(plan.command(Path("/run/s")))[-2:] == ["--max-loras", "2"]


@pytest.mark.parametrize(("rank", "allowed"), [(1, "1"), (4, "8"), (16, "16"), (17, "32"), (300, "320"), (512, "512")])
def test_the_rank_is_one_that_vllm_accepts_and_fits(rank: int, allowed: str) -> None:
    assert arguments(replace(OPTIONS, max_rank=rank))["--max-lora-rank"] == allowed


def test_a_rank_that_vllm_cannot_serve_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"training\.rank = 513, and vLLM takes adapters up to rank 512"):
        arguments(replace(OPTIONS, max_rank=513))


def test_it_gets_none_of_our_variables() -> None:
    given = {
        "HOME": "/home/u",
        "PATH": "/usr/bin",
        "PYTHONPATH": "/ours",
        "VIRTUAL_ENV": "/ours/.venv",
        "TIDEGATE_SERVER__API_KEYS": '["k"]',
        "UPSTREAM_KEY": "sk-1",
        "VLLM_API_KEY": "of another vLLM",
        "VLLM_CPU_KVCACHE_SPACE": "2",
    }
    plans = vllm_plans(OPTIONS, prefix="vllm", replicas=2, gpus=(), environment=given, without=("UPSTREAM_KEY",))
    assert [plan.name for plan in plans] == ["vllm-0", "vllm-1"]
    for plan in plans:
        found = plan.environment
        assert not {name for name in given if name not in ("HOME", "PATH", "VLLM_CPU_KVCACHE_SPACE")} & set(found)
        assert found["VLLM_CPU_KVCACHE_SPACE"] == "2"
        assert found["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
        assert found["PATH"] == "/envs/vllm/bin:/usr/bin"


@pytest.mark.parametrize(
    ("gpus", "replicas", "expected"),
    [
        (("0", "1", "2", "3"), 2, ["0,1", "2,3"]),
        (("0", "1", "2"), 2, ["0", "1"]),
        (("GPU-a",), 1, ["GPU-a"]),
        (("0",), 2, [None, None]),
    ],
)
def test_replicas_get_devices_of_their_own_where_there_are_enough(
    gpus: tuple[str, ...], replicas: int, expected: list[str | None]
) -> None:
    plans = vllm_plans(OPTIONS, prefix="v", replicas=replicas, gpus=gpus, environment={})
    assert [plan.environment.get("CUDA_VISIBLE_DEVICES") for plan in plans] == expected
    assert all("VLLM_CPU_OMP_THREADS_BIND" not in plan.environment for plan in plans)


def test_on_a_processor_replicas_share_no_core() -> None:
    (alone,) = vllm_plans(OPTIONS, prefix="v", replicas=1, gpus=(), environment={})
    assert "VLLM_CPU_OMP_THREADS_BIND" not in alone.environment
    cores = os.sched_getaffinity(0)
    plans = vllm_plans(OPTIONS, prefix="v", replicas=2, gpus=(), environment={})
    bound = [plan.environment.get("VLLM_CPU_OMP_THREADS_BIND", "").split(",") for plan in plans]
    if len(cores) > 1:
        assert not set(bound[0]) & set(bound[1])
        assert {int(core) for share in bound for core in share} <= cores
    told = vllm_plans(OPTIONS, prefix="v", replicas=2, gpus=(), environment={"VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    assert {plan.environment["VLLM_CPU_OMP_THREADS_BIND"] for plan in told} == {"nobind"}


def test_devices_are_those_that_this_process_may_use(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ("0", "1")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, 5"}, tmp_path) == ("3", "5")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == ()
    assert visible_gpus({}, tmp_path / "none") == ()


def test_waits_between_attempts_grow_and_are_bounded() -> None:
    patience = Patience(first_wait_s=1.0, longest_wait_s=10.0)
    assert [patience.wait_s(attempt) for attempt in range(1, 7)] == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]

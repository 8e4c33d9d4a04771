"""How vLLM is started: arguments and environment from the settings.

Every adapter that training makes must fit (rank), and those that serve at once must fit together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tidegate.core.errors import ConfigError
from tidegate.engines.supervised.adapted_modules import adapted_modules
from tidegate.engines.supervised.supervisor import ServerPlan

MODULE = "vllm.entrypoints.openai.api_server"
"""Started with ``-m``: the ``vllm`` command asks for package metadata that the CPU build lacks."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What ``--max-lora-rank`` accepts."""
_OURS = ("TIDEGATE_", "PYTHON", "VIRTUAL_ENV", "VLLM_API_KEY")
"""Of our own process alone; PYTHONPATH would bring our packages into vLLM's environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """What a vLLM serves and how much of it.

    ``python`` has vllm installed. ``max_rank`` is the largest rank that is trained. ``resident`` adapters can be in one
    batch, twice as many stay in memory. ``arguments`` come last and win.
    """

    python: Path
    model_dir: Path
    served_name: str
    max_rank: int
    resident: int
    max_context: int
    max_running: int
    dtype: str
    raw_logprobs: bool
    arguments: Sequence[str] = ()


def vllm_plans(
    options: VllmOptions,
    *,
    prefix: str,
    replicas: int,
    gpus: Sequence[str],
    environment: Mapping[str, str],
    without: Sequence[str] = (),
) -> tuple[ServerPlan, ...]:
    """One plan for each of ``replicas`` servers, named ``prefix-0`` and so on.

    Args:
        options: what they serve.
        prefix: what their names begin with.
        replicas: how many.
        gpus: what CUDA_VISIBLE_DEVICES may name; empty on a machine without.
        environment: of this process.
        without: further variables that they do not get.

    Raises:
        ConfigError: no ``--max-lora-rank`` allows the rank.
        ModelError: a weight file of the model is damaged.
    """
    common = vllm_environment(environment, python=options.python, without=without)
    shares = _shares(gpus, replicas) if gpus else [None] * replicas
    cores = _cores(replicas) if not gpus else [None] * replicas
    plans: list[ServerPlan] = []
    for number in range(replicas):
        own = dict(common)
        if shares[number] is not None:
            own["CUDA_VISIBLE_DEVICES"] = str(shares[number])
        if cores[number] is not None:
            own.setdefault("VLLM_CPU_OMP_THREADS_BIND", str(cores[number]))
        plans.append(
            ServerPlan(
                name=f"{prefix}-{number}",
                command=vllm_command(options),
                environment=own,
                model=options.served_name,
            )
        )
    return tuple(plans)


def vllm_command(options: VllmOptions) -> Callable[[Path], Sequence[str]]:
    """The argument list by the socket to listen on.

    Raises:
        ConfigError: no ``--max-lora-rank`` allows the rank.
        ModelError: a weight file of the model is damaged.
    """
    rank = next((one for one in RANKS if one >= options.max_rank), None)
    if rank is None:
        raise ConfigError(
            f"training.rank = {options.max_rank}, and vLLM takes adapters up to rank {RANKS[-1]}; lower it, or use "
            "engine.kind 'embedded'"
        )

    modules = adapted_modules(options.model_dir)

    def command(socket: Path) -> Sequence[str]:
        return [
            str(options.python), "-m", MODULE,
            "--model", str(options.model_dir.absolute()),
            "--served-model-name", options.served_name,
            "--uds", str(socket),
            "--enable-lora",
            "--max-lora-rank", str(rank),
            "--max-loras", str(options.resident),
            "--max-cpu-loras", str(2 * options.resident),
            "--max-model-len", str(options.max_context),
            "--max-num-seqs", str(options.max_running),
            "--dtype", options.dtype,
            "--logprobs-mode", "raw_logprobs" if options.raw_logprobs else "processed_logprobs",
            "--api-server-count", "1",
            "--uvicorn-log-level", "warning",
            *(["--lora-target-modules", *modules] if modules else []),
            *options.arguments,
        ]  # fmt: skip

    return command


def vllm_environment(environment: Mapping[str, str], *, python: Path, without: Sequence[str] = ()) -> dict[str, str]:
    """Variables of this process without our own, and what vLLM needs to load adapters, offline, without telemetry."""
    kept = {name: value for name, value in environment.items() if not name.startswith(_OURS) and name not in without}
    return {
        **kept,
        "PATH": os.pathsep.join([str(python.parent), environment.get("PATH", os.defpath)]),  # ninja lies there
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "NO_COLOR": "1",
        "PYTHONUNBUFFERED": "1",
    }


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[str, ...]:
    """The NVIDIA devices that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return tuple(one.strip() for one in named.split(",") if one.strip() and one.strip() != "-1")
    return tuple(str(number) for number, _ in enumerate(sorted(devices.glob("nvidia[0-9]*"))))


def _shares(gpus: Sequence[str], replicas: int) -> list[str | None]:
    """Each replica gets its own devices where there are enough; else all share all, and their memory is for the
    user to divide (--gpu-memory-utilization)."""
    each = len(gpus) // replicas
    if each == 0:
        return [None] * replicas
    return [",".join(gpus[number * each : (number + 1) * each]) for number in range(replicas)]


def _cores(replicas: int) -> list[str | None]:
    """Each replica gets its own cores: vLLM binds its threads, by itself two of them to the same ones."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // replicas
    if replicas == 1 or each == 0:
        return [None] * replicas
    return [",".join(map(str, cores[number * each : (number + 1) * each])) for number in range(replicas)]

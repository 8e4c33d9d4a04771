"""What a person should know of an SGLang server before Tidegate uses it: its flags, for ``tidegate doctor``."""

from __future__ import annotations

from tidegate.core.errors import ConfigError
from tidegate.core.types import JsonObject
from tidegate.engines.remote.upstream import RefusedError, Upstream


async def sglang_notes(upstream: Upstream) -> str:
    """Version and the flags that change what Tidegate can do.

    Raises:
        ConfigError: it takes no adapters.
        EngineError: it cannot be asked.
    """
    try:
        info = await upstream.get("/server_info")
    except RefusedError as refused:
        return f"its flags are unknown: {refused.as_error()}"
    if "enable_lora" in info and not info["enable_lora"]:
        raise ConfigError(
            f"{upstream.url} takes no adapters; start SGLang with --enable-lora, --max-lora-rank and "
            "--lora-target-modules"
        )
    return "; ".join([f"SGLang {info.get('version', 'of unknown version')}", *_notes(info)])


def _notes(info: JsonObject) -> list[str]:
    notes: list[str] = []
    if not info.get("enable_deterministic_inference"):
        notes.append("it ignores seeds: --enable-deterministic-inference heeds them")
    if info.get("max_loaded_loras") is not None:
        notes.append(
            f"it drops adapters beyond --max-loaded-loras {info['max_loaded_loras']} on its own: leave that flag out"
        )
    if info.get("allow_auto_truncate"):
        notes.append("it shortens prompts silently, and such answers do not train: leave --allow-auto-truncate out")
    return notes

"""Constructing the engine that the settings ask for."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from tidegate.config import Settings
from tidegate.ports import Engine


def model_name(settings: Settings) -> str:
    """Name of the model in ``/v1/models`` and release ids: ASCII letters, digits, dots, dashes and underscores.

    Release ids go out in headers, which hold no others. Never empty.
    """
    name = settings.model.name or settings.model.path.rstrip("/").rsplit("/", 1)[-1]
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).strip("-.") or "model"


def resolve_base(settings: Settings, *, progress: Callable[[str], None] | None = None) -> Path:
    """Directory of the base model, fetched into the cache if need be."""
    from tidegate.engines.model_cache import resolve_model  # noqa: PLC0415 - pulls in torch when converting

    return resolve_model(settings.model.path, progress=progress)


@asynccontextmanager
async def embedded_engine(settings: Settings, model_dir: Path, *, replica: str) -> AsyncGenerator[Engine]:
    """Start an embedded engine for the length of a block."""
    from tidegate.engines.embedded import EmbeddedEngine  # noqa: PLC0415 - imports torch

    engine = EmbeddedEngine(
        model_dir,
        dtype=settings.model.dtype,
        max_batch=settings.model.max_batch,
        max_queue=settings.model.max_queue,
        max_context=settings.model.max_context,
        max_resident_adapters=settings.model.max_resident_adapters,
        threads=settings.model.threads,
        replica=replica,
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()

"""Memory of releases that are gone: nothing refers to their weights when the system is asked to take pages back.

How much that is shows in ``scripts/bench memory``, with weights large enough for the C library to keep.
"""

from __future__ import annotations

import gc
import platform
import weakref
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from engine_fixtures import answer, call, lane_of, running, write_adapter, write_tiny_model
from tidegate.artifacts import adapter_hash
from tidegate.core.types import AdapterRef
from tidegate.engines.embedded import residents
from tidegate.engines.embedded.engine import EmbeddedEngine
from tidegate.engines.embedded.give_back import give_back_memory


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncGenerator[EmbeddedEngine]:
    model_dir = write_tiny_model(tmp_path / "tiny")
    async with running(model_dir, max_resident_adapters=1) as started:
        for seed, name in enumerate("ab", start=1):
            write_adapter(tmp_path / name, model_dir, seed=seed)
        gc.collect()
        gc.disable()  # what only the collector would find stays for long in a server that allocates little
        try:
            yield started
        finally:
            gc.enable()


@pytest.mark.parametrize("way", ["unloaded", "evicted"])
async def test_the_weights_are_gone_before_their_pages_are_given_back(
    engine: EmbeddedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    await engine.load(reference(tmp_path / "a"))
    await answer(engine, call("once", adapter="a"))
    weights = weakref.ref(lane_of(engine, "a").runner.model)
    left: list[Any] = []
    monkeypatch.setattr(residents, "give_back_memory", lambda: left.append(weights()))
    if way == "unloaded":
        await engine.unload("a")
    else:
        await engine.load(reference(tmp_path / "b"))
    assert left == [None]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have nothing to ask")
def test_the_c_library_can_be_asked() -> None:
    assert give_back_memory() is True


def reference(folder: Path) -> AdapterRef:
    return AdapterRef(name=folder.name, path=folder, sha256=adapter_hash(folder))

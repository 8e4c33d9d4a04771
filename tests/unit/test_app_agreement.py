"""``tidegate engine check``: one distribution is found to be one, and every way of its being two is found."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tidegate.app.agreement import check_engine
from tidegate.app.engines import Base, open_engine
from tidegate.app.layout import DataDirectory
from tidegate.app.stores import open_stores
from tidegate.cli.main import app
from tidegate.config import Settings
from tidegate.config.engine import EngineSettings
from tidegate.config.settings import ModelSettings
from tidegate.core.errors import ConfigError, EngineError, NotFoundError, TrainingError
from tidegate.core.types import AdapterRef, GenerationEvent, GenerationRequest, PromptTokens, Release, TokenDelta
from tidegate.ports import Engine
from tidegate.release import CHAMPION
from tidegate.training.scoring import ScoringJob, score_here, score_sequences
from training_fixtures import trained_adapter
from upstream_server import running_upstream

RELEASE = "m-r1-trained"


class Lying:
    """An engine whose statements pass through ``lie``; everything else is the real one's."""

    def __init__(self, engine: Engine, lie: str) -> None:
        self._engine = engine
        self._lie = lie
        self.loaded: list[AdapterRef] = []
        self.base_sha256 = engine.base_sha256
        self.replica = engine.replica
        self.unload, self.list_adapters, self.health, self.probe = (
            engine.unload, engine.list_adapters, engine.health, engine.probe,
        )  # fmt: skip

    async def load(self, adapter: AdapterRef) -> None:
        self.loaded.append(adapter)
        await self._engine.load(adapter)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        seen = replace(request, adapter=None) if self._lie == "base weights" else request
        async for event in self._engine.generate(seen):
            told = event
            if isinstance(told, TokenDelta) and self._lie == "raw":  # what it says is of temperature 1, roughly
                told = replace(told, logprobs=tuple(value * request.sampling.temperature for value in told.logprobs))
            if isinstance(told, TokenDelta) and self._lie == "no tokens":
                told = replace(told, token_ids=(), logprobs=(), token_exact=False)
            if isinstance(told, PromptTokens) and self._lie == "unknown":
                told = replace(told, distribution_known=False)
            yield told

    async def sequence_logprobs(
        self, adapter: str | None, token_ids: Sequence[int], *, first: int = 1
    ) -> tuple[float, ...]:
        if self._lie == "base weights":
            return await self._engine.sequence_logprobs(None, token_ids, first=first)
        if self._lie == "off by one":
            return (await self._engine.sequence_logprobs(adapter, token_ids, first=first - 1))[:-1]
        return await self._engine.sequence_logprobs(adapter, token_ids, first=first)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A data directory whose champion the trainer made."""
    folder = tmp_path_factory.mktemp("check")
    model, adapters, sha256 = trained_adapter(folder)
    made = Settings(
        data_dir=folder / "data",
        model=ModelSettings(path=str(model), threads=1, dtype="float32"),
        engine=EngineSettings(agreement_max_nats=1e-2, agreement_mean_nats=1e-3),
    )
    directory = DataDirectory.of(made).create()
    shutil.copytree(adapters / sha256, directory.adapters / sha256)
    with open_stores(directory) as stores:
        stores.releases.add_release(
            Release(id=RELEASE, number=1, adapter_sha256=sha256, base_sha256="b" * 64, certificate=None, created_at=1.0)
        )
        stores.releases.move_aliases({CHAMPION: RELEASE}, reason="test", time=1.0)
    return made


def through(lie: str, seen: list[Lying] | None = None) -> Callable[[Settings, Base], AbstractAsyncContextManager[Any]]:
    @asynccontextmanager
    async def opened(settings: Settings, base: Base) -> AsyncGenerator[Any]:
        async with open_engine(settings, base, replica="check") as engine:
            lying = Lying(engine, lie)
            if seen is not None:
                seen.append(lying)
            yield lying
            assert await engine.list_adapters() == ()

    return opened


async def checked(settings: Settings, lie: str = "", **options: Any) -> Any:
    asked: dict[str, Any] = {"release_id": None, "samples": 3, "temperature": 1.0, **options}
    opened = asked.pop("engine_from", through(lie))
    return await check_engine(settings, say=lambda _: None, engine_from=opened, score=score_here, **asked)


async def test_an_engine_that_computes_what_it_says_agrees(settings: Settings) -> None:
    seen: list[Lying] = []
    report = await checked(settings, engine_from=through("", seen))
    assert report["agrees"], report
    assert (report["release"], report["answers"], report["left_out"]) == (RELEASE, 3, {})
    assert set(report["pairs"]) == {"sampled_rescored", "sampled_trainer", "rescored_trainer"}
    for gap in report["pairs"].values():
        assert gap["tokens"] == report["tokens"] > 3
        assert gap["max"] < 1e-3
    assert report["answer_ratio"] == pytest.approx([1.0, 1.0], abs=1e-2)
    assert "one distribution" in report["meaning"]
    (adapter,) = seen[0].loaded
    assert adapter.name != RELEASE  # a server beside us may hold that name in the same engine, and it is unloaded
    assert adapter.name.startswith("check-")


@pytest.mark.parametrize(
    ("lie", "temperature", "beyond", "says"),
    [
        ("base weights", 1.0, {"rescored_trainer", "sampled_trainer"}, "do not compute one distribution"),
        ("off by one", 1.0, {"rescored_trainer", "sampled_rescored"}, "do not compute one distribution"),
        ("raw", 0.7, {"sampled_trainer"}, "engine.logprobs"),
    ],
)
async def test_two_distributions_are_found(
    settings: Settings, lie: str, temperature: float, beyond: set[str], says: str
) -> None:
    report = await checked(settings, lie, temperature=temperature)
    assert not report["agrees"]
    assert {name for name, gap in report["pairs"].items() if gap["mean"] > 1e-3} == beyond
    assert says in report["meaning"]


async def test_a_vllm_server_with_other_base_weights_is_found(settings: Settings) -> None:
    """What it says while it samples and of what it sampled agrees; the trainer has other weights."""
    async with running_upstream(vllm=True) as server:
        remote = EngineSettings(kind="vllm", urls=(server.url,), model=server.model)
        report = await check_engine(
            settings.model_copy(update={"engine": remote}), release_id=None, samples=3, temperature=1.0,
            say=lambda _: None, score=score_here,
        )  # fmt: skip
        assert server.adapters == {}
        assert {name.startswith("check-") for _, name in server.changes} == {True}
    assert (report["engine"], report["agrees"]) == ("vllm", False)
    assert report["pairs"]["sampled_rescored"]["max"] < 1e-3
    assert report["pairs"]["rescored_trainer"]["mean"] > 0.5


async def test_what_is_not_of_the_distribution_sampled_from_is_not_compared(settings: Settings) -> None:
    report = await checked(settings, "unknown", temperature=0.7)
    assert report["agrees"], report
    assert set(report["pairs"]) == {"rescored_trainer"}
    assert set(report["left_out"]) == {"sampled_rescored", "sampled_trainer"}


async def test_what_cannot_be_compared_is_refused(settings: Settings) -> None:
    with pytest.raises(EngineError, match="gives no token ids"):
        await checked(settings, "no tokens")
    with pytest.raises(NotFoundError, match="'m-r9'"):
        await checked(settings, release_id="m-r9")
    openai = settings.model_copy(update={"engine": EngineSettings(kind="openai", urls=("http://127.0.0.1:9",))})
    with pytest.raises(ConfigError, match="nothing to compare with"):
        await checked(openai)


def test_a_directory_that_was_never_used_checks_the_base_model(settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "tidegate.toml"
    lines = [
        f'data_dir = "{tmp_path / "empty"}"',
        "[model]",
        f'path = "{settings.model.path}"',
        "threads = 1",
        'dtype = "float32"',
    ]
    file.write_text("\n".join(lines), encoding="utf-8")
    asked = ["--config", str(file), "engine", "check", "--samples", "2"]
    done = CliRunner().invoke(app, [*asked, "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["release"], report["adapter_sha256"], report["agrees"]) == (None, None, True)
    assert not (tmp_path / "empty").exists()
    file.write_text("\n".join([*lines, "[engine]", "agreement_max_nats = 1e-12"]), encoding="utf-8")
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 1
    assert "beyond the tolerance" in done.stdout
    assert "ratio_high" in done.stdout
    done = CliRunner().invoke(app, [*asked, "--release", "m-r9"])
    assert done.exit_code == 2
    assert "m-r9" in done.stderr


def test_weights_that_cannot_be_loaded_are_named(tmp_path: Path) -> None:
    job = ScoringJob(
        base_model=tmp_path / "nowhere", base_sha256="b" * 64, adapter=None, dtype="float32", threads=1,
        temperature=1.0, sequences=(((1, 2, 3), 1),),
    )  # fmt: skip
    with pytest.raises(TrainingError, match="nowhere"):
        score_sequences(job, timeout_s=120.0)
    with pytest.raises(TrainingError, match=r"took longer than 0\.01 s"):
        score_sequences(job, timeout_s=0.01)

"""``tidegate engine check``: the same tokens scored where they were sampled, by the engine again, and by the trainer.

The engine samples answers to fixed prompts of ours as it would for a user. Its statements are then compared pair by
pair: what it said while it decoded, what it says of the finished sequence, and what the trainer computes for it. Opens
an engine of its own, beside a running server if there is one, and loads adapters under a name of its own.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, TypeAlias

from tidegate.app.engines import Base, agreement_tolerance, base_of, open_engine, with_upstream_model
from tidegate.app.layout import DataDirectory
from tidegate.app.stores import has_database, open_stores
from tidegate.config import Settings
from tidegate.core.agreement import AGREEMENT_TEXTS, Gap, Tolerance, gap_between
from tidegate.core.errors import ConfigError, EngineError, NotFoundError
from tidegate.core.generation import collect
from tidegate.core.selection.sequences import has_tokens
from tidegate.core.types import AdapterRef, GenerationRequest, JsonObject, Messages, Release, Sampling
from tidegate.ports import Engine
from tidegate.release.records import release_behind
from tidegate.release.router import CHAMPION
from tidegate.training.scoring import ScoringJob, score_sequences

MAX_TOKENS: Final = 64
_TIMEOUT_S: Final = 1800.0
_CONCURRENT: Final = 8

_QUESTIONS: Final[tuple[str, ...]] = (
    "Explain in two sentences why the sky is blue.",
    "Give me a recipe for pancakes.",
    "How many minutes are there in three and a half hours? Show your working.",
    "Write a short poem about the sea.",
    "Which is larger, 17 times 23 or 19 times 21?",
    "Translate 'good morning' into three languages.",
    "List five animals that live in rivers.",
    "Write a JSON object with the keys 'name' and 'age'.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One answer: all tokens (T,), the index of its first sampled one, and what was said while it was sampled.

    ``logprobs`` (T - first,) are None where what the engine says is not of the distribution that it sampled from.
    """

    token_ids: tuple[int, ...]
    first: int
    logprobs: tuple[float, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What is checked: a release and its adapter, or the bare base model without a release."""

    release: Release | None
    adapter: AdapterRef | None


Score: TypeAlias = Callable[[ScoringJob], tuple[tuple[float, ...], ...]]
OpenEngine: TypeAlias = Callable[[Settings, Base], AbstractAsyncContextManager[Engine]]


@asynccontextmanager
async def _opened(settings: Settings, base: Base) -> AsyncGenerator[Engine]:
    async with open_engine(settings, base, replica="check") as engine:
        yield engine


def _score_apart(job: ScoringJob) -> tuple[tuple[float, ...], ...]:
    return score_sequences(job, timeout_s=_TIMEOUT_S)


async def check_engine(
    settings: Settings,
    *,
    release_id: str | None,
    samples: int,
    temperature: float,
    say: Callable[[str], None],
    engine_from: OpenEngine = _opened,
    score: Score = _score_apart,
) -> JsonObject:
    """Sample, score twice, compare.

    Args:
        settings: name the engine and the base model.
        release_id: whose adapter is checked; None takes the champion, the bare base model where nothing was served yet.
        samples: answers, >= 1.
        temperature: > 0, that answers are sampled at.
        say: told of progress.
        engine_from: opens the engine.
        score: computes as the trainer does.

    Returns:
        ``engine``, ``release``, ``adapter_sha256``, ``temperature``, ``trainer_dtype``, ``answers``, ``tokens``,
        ``tolerance``, ``pairs`` (figures of each pair, see :class:`tidegate.core.agreement.Gap`), ``answer_ratio``
        (smallest and largest importance weight of a whole answer), ``left_out`` (pairs that can't be compared, and
        why), ``agrees`` and ``meaning``, in words.

    Raises:
        ConfigError: the engine is an upstream whose weights nobody here can read.
        NotFoundError: there is no such release.
        EngineError, AdapterError, TrainingError: why a side cannot be asked.
    """
    if settings.engine.kind == "openai":
        raise ConfigError(
            "engine.kind is 'openai': this upstream scores no given tokens, and its weights cannot be read here, so "
            "that there is nothing to compare with; set engine.kind to 'vllm', 'sglang' or 'embedded', and model.path "
            "to the weights"
        )
    named = await with_upstream_model(settings)
    base = await asyncio.to_thread(base_of, named, progress=say)
    if base.directory is None:
        raise ConfigError("the weights of the base model cannot be read here; set model.path to them")
    weights = await asyncio.to_thread(_weights, named, release_id)
    shown = "the bare base model" if weights.adapter is None else f"adapter {weights.adapter.sha256[:12]}"
    say(f"{samples} answers of {shown} at temperature {temperature:g}")
    async with engine_from(named, base) as engine, _loaded(engine, weights.adapter) as adapter:
        sampled = await _sampled(engine, adapter, samples, temperature)
        rescored = [await engine.sequence_logprobs(adapter, one.token_ids, first=one.first) for one in sampled]
    # Only now: engine and trainer each hold the model, and a machine may have room for one.
    say("the trainer's forward pass")
    job = _job(named, base, weights.adapter, sampled, temperature)
    trained = await asyncio.to_thread(score, job)
    at_one = trained if temperature == 1.0 else await asyncio.to_thread(score, replace(job, temperature=1.0))
    return _report(named, weights, sampled, rescored, trained, at_one, temperature)


def _weights(settings: Settings, release_id: str | None) -> Weights:
    directory = DataDirectory.of(settings)
    if not has_database(directory):
        if release_id is not None:
            raise NotFoundError(
                f"release {release_id!r} does not exist: data directory {str(directory.root)!r} is empty"
            )
        return Weights(release=None, adapter=None)
    with open_stores(directory) as stores:
        releases = stores.releases.list_releases()
        if release_id is None and not releases:
            return Weights(release=None, adapter=None)
        if release_id is None:
            release = release_behind(stores.releases, CHAMPION)
        else:
            known = {one.id: one for one in releases}
            if release_id not in known:
                raise NotFoundError(f"release {release_id!r} does not exist; 'tidegate releases list' shows all")
            release = known[release_id]
    sha256 = release.adapter_sha256
    if sha256 is None:
        return Weights(release=release, adapter=None)
    # Never the release's own name: a running server may hold that in the same engine, and it is unloaded at the end.
    name = f"check-{sha256[:8]}-{uuid.uuid4().hex[:8]}"
    return Weights(release=release, adapter=AdapterRef(name=name, path=directory.adapters / sha256, sha256=sha256))


@asynccontextmanager
async def _loaded(engine: Engine, adapter: AdapterRef | None) -> AsyncGenerator[str | None]:
    if adapter is None:
        yield None
        return
    await engine.load(adapter)
    try:
        yield adapter.name
    finally:
        await engine.unload(adapter.name)


async def _sampled(engine: Engine, adapter: str | None, samples: int, temperature: float) -> list[Sampled]:
    prompts: list[Messages] = [
        *(messages for messages, _ in AGREEMENT_TEXTS),
        *(({"role": "user", "content": question},) for question in _QUESTIONS),
    ]
    room = asyncio.Semaphore(_CONCURRENT)

    async def answer(number: int) -> Sampled:
        request = GenerationRequest(
            request_id=f"check-{number}",
            messages=prompts[number % len(prompts)],
            sampling=Sampling(temperature=temperature, max_tokens=MAX_TOKENS, seed=number),
            adapter=adapter,
        )
        async with room:
            fold = await collect(engine.generate(request))
        (choice,) = fold.all_choices(1)
        if not has_tokens(fold.prompt_token_ids, choice):
            raise EngineError(
                f"engine {engine.replica!r} gives no token ids or log-probabilities with its answers; nothing it says "
                "can be compared, and nothing it answers trains"
            )
        is_known = fold.as_sampled(request.sampling).distribution_known
        return Sampled(
            token_ids=(*fold.prompt_token_ids, *choice.token_ids),
            first=len(fold.prompt_token_ids),
            logprobs=choice.logprobs if is_known else None,
        )

    return list(await asyncio.gather(*(answer(number) for number in range(samples))))


def _job(
    settings: Settings, base: Base, adapter: AdapterRef | None, sampled: Sequence[Sampled], temperature: float
) -> ScoringJob:
    assert base.directory is not None  # noqa: S101 - refused before
    return ScoringJob(
        base_model=base.directory,
        base_sha256=base.sha256,
        adapter=None if adapter is None else adapter.path,
        dtype=settings.training.dtype,
        threads=settings.model.threads,
        temperature=temperature,
        sequences=tuple((one.token_ids, one.first) for one in sampled),
    )


def _report(  # noqa: PLR0917 - one place puts the sides together
    settings: Settings,
    weights: Weights,
    sampled: Sequence[Sampled],
    rescored: Sequence[Sequence[float]],
    trained: Sequence[Sequence[float]],
    trained_at_one: Sequence[Sequence[float]],
    temperature: float,
) -> JsonObject:
    tolerance = agreement_tolerance(settings)
    said = [one.logprobs for one in sampled if one.logprobs is not None]
    gaps: dict[str, Gap] = {"rescored_trainer": gap_between(rescored, trained_at_one, tolerance=tolerance)}
    left_out: dict[str, str] = {}
    ratios: list[float] = []
    if len(said) == len(sampled):
        gaps["sampled_trainer"] = gap_between(said, trained, tolerance=tolerance)
        ratios = [_answer_ratio(mine, theirs) for mine, theirs in zip(said, trained, strict=True)]
    else:
        left_out["sampled_trainer"] = (
            "what the engine states at this temperature is not what it samples from, as engine.logprobs says; such "
            "answers train without importance weights"
        )
    if temperature == 1.0 and said:
        gaps["sampled_rescored"] = gap_between(said, rescored, tolerance=tolerance)
    else:
        left_out["sampled_rescored"] = "engines score given tokens at temperature 1 only"
    agrees = all(gap.within(tolerance) for gap in gaps.values())
    return {
        "engine": settings.engine.kind,
        "release": None if weights.release is None else weights.release.id,
        "adapter_sha256": None if weights.adapter is None else weights.adapter.sha256,
        "temperature": temperature,
        "trainer_dtype": settings.training.dtype,
        "answers": len(sampled),
        "tokens": sum(map(len, rescored)),
        "tolerance": asdict(tolerance),
        "pairs": {name: asdict(gap) for name, gap in sorted(gaps.items())},
        "answer_ratio": [min(ratios), max(ratios)] if ratios else None,
        "left_out": left_out,
        "agrees": agrees,
        "meaning": _meaning(gaps, tolerance, ratios, cap=settings.training.importance_cap),
    }


def _answer_ratio(sampled: Sequence[float], trained: Sequence[float]) -> float:
    return math.exp(min(math.fsum(trained) - math.fsum(sampled), 700.0))


def _meaning(gaps: dict[str, Gap], tolerance: Tolerance, ratios: Sequence[float], *, cap: float) -> str:
    """What the figures mean for importance weights, in sentences."""
    beyond = [name for name, gap in sorted(gaps.items()) if not gap.within(tolerance)]
    told: list[str] = []
    if "sampled_trainer" in gaps:
        gap = gaps["sampled_trainer"]
        told.append(
            f"a token of unchanged weights counts {gap.ratio_low:.3g} to {gap.ratio_high:.3g} times where it should "
            f"count once; over a whole answer {min(ratios):.3g} to {max(ratios):.3g} times"
        )
        if cap and gap.ratio_high > cap:
            told.append(f"training.importance_cap = {cap:g} cuts some of that off, which biases the weights")
    if not beyond:
        return "; ".join([*told, "trainer and engine compute one distribution within the tolerance"])
    told.append(f"beyond the tolerance: {', '.join(beyond)}")
    if "rescored_trainer" in beyond:
        told.append(
            "engine and trainer do not compute one distribution: compare base weights, dtype, adapter scale and "
            "quantisation; until then train with 'sft', which needs no ratio"
        )
    elif "sampled_trainer" in beyond:
        told.append(
            "what the engine states with its answers is of another distribution than it computes for them: look at "
            "engine.logprobs and at what the server changes before it samples; until then train with 'sft'"
        )
    else:
        told.append("decoding and scoring differ inside the engine: look at its dtype and caches")
    return "; ".join(told)


def figures_table(report: JsonObject) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Columns and rows of the report's pairs for people."""
    columns = ("pair", "tokens", "max", "mean", "p99", "above", "ratio_low", "ratio_high")
    rows = [
        (name, gap["tokens"], *(f"{gap[column]:.3g}" for column in columns[2:]))
        for name, gap in report["pairs"].items()
    ]
    return columns, rows

"""What the engine port means over any server that loads adapters while it runs; a dialect says how it is asked.

The server reads adapters from the same paths as this process. Their content is checked here before and after it reads
them; names are unique and immutable, nothing is loaded in place, and an adapter is unloaded when its last call has
ended. Adapters of others on the same server are neither listed nor touched.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import ClassVar

from tidegate.artifacts import adapter_hash
from tidegate.core.errors import AdapterError, EngineError, EngineUnavailableError, RequestError, TidegateError
from tidegate.core.generation import collect, require_scorable
from tidegate.core.types import AdapterRef, GenerationEvent, GenerationRequest, JsonObject, Messages, Sampling
from tidegate.engines.remote.adapters import AdapterTable, check_adapter
from tidegate.engines.remote.answers import AnswerReader
from tidegate.engines.remote.models import ListedModel, listed_models
from tidegate.engines.remote.upstream import RefusedError, Upstream
from tidegate.ports.engine import EngineHealth, ProbeResult

HEALTH_TIMEOUT_S = 5.0
_PROBE_TOKENS = 8
_NOISE_FACTOR = 2.0
"""A difference within twice what repeating the same question gives is no difference."""


class AdapterServerEngine(ABC):
    """Serves one base model and its adapters; implements :class:`tidegate.ports.engine.Engine`.

    A subclass is a dialect: the class variables and the abstract methods.

    Args:
        upstream: the server; closed by whoever made it.
        model: name of the base model there.
        base_sha256: content hash of the base model's weights, as this side knows them.
        replica: name recorded with each interaction.
        raw_logprobs: whether the server states log-probabilities of temperature 1, whatever it samples at.
        why_down: says why the server does not run, where whoever started it knows; None while it does.
    """

    load_path: ClassVar[str]
    unload_path: ClassVar[str]
    needs: ClassVar[str]
    """What a server without run-time adapters must be started with."""
    gives_ids: ClassVar[str]
    """Which versions give token ids."""

    def __init__(
        self,
        upstream: Upstream,
        *,
        model: str,
        base_sha256: str,
        replica: str,
        raw_logprobs: bool,
        why_down: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._upstream = upstream
        self._model = model
        self._base_sha256 = base_sha256
        self._replica = replica
        self._raw_logprobs = raw_logprobs
        self._why_down = why_down
        self._table = AdapterTable()
        self._changing = asyncio.Lock()
        self._running = 0

    @property
    def replica(self) -> str:
        """Name of this replica."""
        return self._replica

    @property
    def base_sha256(self) -> str:
        """Content hash of the base model's weights."""
        return self._base_sha256

    async def load(self, adapter: AdapterRef) -> None:
        """Check an adapter's files, have the server load them, and see it listed.

        One that the server holds already, from the same path, is taken over: its process outlives ours. One that it
        held and has lost, because it was started anew, is loaded again.

        Raises:
            AdapterError: the files are not those of ``adapter``, belong to another base, the name is taken, or the
                server refuses them.
            EngineError: the server fails or cannot be reached.
        """
        async with self._changing:
            known = self._table.known(adapter)
            if known:
                listed = await listed_models(self._upstream)
                if adapter.name in listed:
                    self._require_same(adapter, listed[adapter.name])
                    return
            await asyncio.to_thread(check_adapter, adapter, base_sha256=self._base_sha256)
            listed = await listed_models(self._upstream)
            if adapter.name in listed:
                self._require_same(adapter, listed[adapter.name])
            else:
                await self._load(adapter)
                listed = await listed_models(self._upstream)
                if adapter.name not in listed:
                    raise EngineError(
                        f"{self._upstream.url} says that it loaded {adapter.name!r} and does not list it; "
                        "with several replicas behind one address each needs an engine of its own"
                    )
            try:  # the server read the files after our check: they must be the same ones still
                await asyncio.to_thread(check_adapter, adapter, base_sha256=self._base_sha256)
            except AdapterError:
                await self._unload(adapter.name)  # or a later attempt would take over what nobody has checked
                raise
            if not known:  # else its entry counts the calls that still use it
                self._table.add(adapter)

    async def unload(self, name: str) -> None:
        """Forget an adapter once no running request uses it. Unknown names are a no-op."""
        if not await self._table.drained(name):
            return
        async with self._changing:
            if not await self._table.drained(name):
                return
            try:
                await self._unload(name)
            except EngineError:
                self._table.keep(name)  # listed again, so that somebody tries again
                raise
            self._table.forget(name)

    async def list_adapters(self) -> tuple[AdapterRef, ...]:
        """Those of ours that the server lists now."""
        if not self._table.refs():
            return ()
        listed = await listed_models(self._upstream)  # whatever changes meanwhile, the table says it
        return tuple(ref for ref in self._table.refs() if ref.name in listed)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent]:
        """Stream one call; closing the iterator ends the request to the server, which stops generating.

        Raises:
            AdapterError: ``request.adapter`` is not loaded, or the server has lost it.
            RequestError: the server refuses the request, e.g. because the prompt is longer than its context.
            EngineBusyError: it has too much to do; with its Retry-After.
            EngineTimeoutError: it is silent too long.
            EngineUnavailableError: it cannot be reached or does not serve now.
            EngineError: it fails, or what it sends is no whole answer.
        """
        down = self._why_down()
        if down is not None:
            raise EngineUnavailableError(down)
        with self._upstream.speakable_errors(), self._table.holding(request.adapter):
            self._running += 1
            try:
                reader = AnswerReader(request, distribution_known=self._states_what_is_sampled(request.sampling))
                async with aclosing(self._chunks(request)) as chunks:
                    async for chunk in chunks:
                        for event in reader.read(chunk):
                            yield event
                for event in reader.finish():
                    yield event
            except RefusedError as refused:
                raise self._refused(refused, request.adapter) from refused
            finally:
                self._running -= 1

    async def probe(self, name: str, *, against: str | None, prompts: Sequence[Messages]) -> ProbeResult:
        """Largest difference of log-probabilities between two sets of weights, on the prompts and a short answer each.

        The difference is 0 when it is not above what the same weights give when asked twice, and also when ``name``
        answers just as the base does: a server that fell back to its base differs from every other adapter.

        Raises:
            AdapterError: one of them is not loaded, the server no longer lists ``name``, or has it from elsewhere.
            RequestError: no prompt was given, or one is longer than the context.
            EngineError: the server fails.
        """
        if not prompts:
            raise RequestError("a probe needs at least one prompt")
        ref = self._table.ref(name)
        with self._table.holding(name), self._table.holding(against):
            listed = await listed_models(self._upstream)
            if name not in listed:
                raise AdapterError(f"{self._upstream.url} does not list {name!r}; was it restarted? Load it anew")
            self._require_same(ref, listed[name])
            sha256 = await asyncio.to_thread(adapter_hash, ref.path)
            others = tuple(dict.fromkeys((against, None)))
            differences = [0.0 for _ in others]
            for messages in prompts:
                token_ids = await self._answered(messages, against)
                mine = await self._asked_twice(name, token_ids)
                for position, other in enumerate(others):
                    found = _difference(mine, await self._asked_twice(other, token_ids))
                    differences[position] = max(differences[position], found)
        return ProbeResult(name=name, sha256=sha256, max_logit_difference=min(differences))

    async def sequence_logprobs(
        self, adapter: str | None, token_ids: Sequence[int], *, first: int = 1
    ) -> tuple[float, ...]:
        """Log-probability, at temperature 1, of each token from index ``first`` on given those before it.

        Raises:
            AdapterError: ``adapter`` is not loaded.
            RequestError: ``first`` is not in [1, T), or the server refuses the sequence as too long.
            EngineError: the server fails, or states something else.
        """
        given = list(token_ids)
        require_scorable(first, len(given))
        with self._table.holding(adapter):
            try:
                found = await self._scored(adapter, given, first)
            except RefusedError as refused:
                raise self._refused(refused, adapter) from refused
        if any(math.isnan(one) for one in found):
            raise EngineError(f"the model gave no finite logits (adapter {adapter!r}); the weights are damaged")
        return found

    async def health(self) -> EngineHealth:
        """Whether the server serves and still lists our adapters; a restarted one has lost them."""
        down = self._why_down()
        if down is not None:
            return self._health(ready=False, detail=down)
        try:
            await self._upstream.call("GET", "/health", None, timeout_s=HEALTH_TIMEOUT_S)
            refs = self._table.refs()
            listed = await listed_models(self._upstream, timeout_s=HEALTH_TIMEOUT_S) if refs else {}
        except RefusedError as refused:
            return self._health(ready=False, detail=str(refused.as_error()))
        except TidegateError as error:
            return self._health(ready=False, detail=str(error))
        ours = set(self._table.refs())  # one that was unloaded meanwhile is not lost
        lost = [ref.name for ref in refs if ref in ours and ref.name not in listed]
        if lost:
            return self._health(ready=False, detail=f"{self._upstream.url} has lost {lost}; load them anew")
        return self._health(ready=True, detail="serving")

    def _health(self, *, ready: bool, detail: str) -> EngineHealth:
        return EngineHealth(ready=ready, detail=detail, queued=0, running=self._running)

    @abstractmethod
    def _chunks(self, request: GenerationRequest) -> AsyncGenerator[JsonObject]:
        """The answer as :class:`AnswerReader` takes it. Raises RefusedError, and as :meth:`generate`."""

    @abstractmethod
    async def _scored(self, adapter: str | None, given: Sequence[int], first: int) -> tuple[float, ...]:
        """As :meth:`sequence_logprobs`, of a range that was checked. Raises RefusedError too."""

    @abstractmethod
    def _refused(self, refused: RefusedError, adapter: str | None) -> TidegateError:
        """What a refused call means; a server that lost ``adapter`` is an AdapterError."""

    @abstractmethod
    def _lacks_adapters(self, refused: RefusedError) -> bool:
        """Whether a server that refuses to load does so because it takes no adapters at all."""

    async def _load(self, adapter: AdapterRef) -> None:
        body = {"lora_name": adapter.name, "lora_path": str(adapter.path.resolve())}
        try:
            await self._upstream.call("POST", self.load_path, body)
        except RefusedError as refused:
            if self._lacks_adapters(refused):
                raise EngineError(f"{self._upstream.url} takes no adapters; {self.needs}") from refused
            if refused.status in (400, 404, 422):
                raise AdapterError(
                    f"{self._upstream.url} refuses adapter {adapter.name!r} from {body['lora_path']!r}: "
                    f"{refused.message}; it must see that path, and --max-lora-rank must allow the rank"
                ) from refused
            raise refused.as_error() from refused

    async def _unload(self, name: str) -> None:
        try:
            await self._upstream.call("POST", self.unload_path, {"lora_name": name})
        except RefusedError as refused:
            if refused.status not in (400, 404) or name in await listed_models(self._upstream):
                raise EngineError(f"adapter {name!r} could not be unloaded: {refused}") from refused

    def _require_same(self, adapter: AdapterRef, listed: ListedModel) -> None:
        """What the server has under a name is ours only when it came from our path."""
        if listed.parent is None or listed.root is None or Path(listed.root) != adapter.path.resolve():
            raise AdapterError(
                f"adapter name {adapter.name!r} is taken on {self._upstream.url} by other content "
                f"(from {listed.root!r}); names are never reused: load it under a name of its own"
            )

    def _states_what_is_sampled(self, sampling: Sampling) -> bool:
        """Raw log-probabilities are those of temperature 1, whatever the temperature; a greedy call has none."""
        return not self._raw_logprobs or sampling.temperature in (0.0, 1.0)

    async def _answered(self, messages: Messages, adapter: str | None) -> tuple[int, ...]:
        """Tokens of a prompt and the beginning of a greedy answer to it."""
        request = GenerationRequest(
            request_id="probe",
            messages=messages,
            sampling=Sampling(temperature=0.0, max_tokens=_PROBE_TOKENS),
            adapter=adapter,
        )
        fold = await collect(self.generate(request))
        token_ids = (*fold.prompt_token_ids, *fold.choices()[0].token_ids)
        if len(token_ids) < 2:
            raise EngineError(f"{self._upstream.url} gives no token ids; {self.gives_ids}")
        return token_ids

    async def _asked_twice(self, adapter: str | None, token_ids: Sequence[int]) -> tuple[Sequence[float], ...]:
        return tuple([await self.sequence_logprobs(adapter, token_ids) for _ in range(2)])


def _difference(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """In nats, of two sets of weights that were asked twice; 0 when it could be noise."""
    noise = max(_distance(*ours), _distance(*theirs))
    found = _distance(ours[0], theirs[0])
    return found if found > _NOISE_FACTOR * noise else 0.0


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))

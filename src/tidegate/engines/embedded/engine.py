"""The engine port over transformers on this machine's processor: several releases at once, batched continuously."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import torch

from tidegate.core.chat import encode_prompt
from tidegate.core.errors import EngineError, RequestError
from tidegate.core.generation import require_scorable
from tidegate.core.types import (
    AdapterRef,
    ChoiceEnd,
    GenerationEvent,
    GenerationRequest,
    Messages,
    PromptTokens,
)
from tidegate.engines.embedded.adapters import LoraWeights, merged_model, read_adapter
from tidegate.engines.embedded.constraints import Constraint, Grammars
from tidegate.engines.embedded.forms import form_of
from tidegate.engines.embedded.forward import Runner
from tidegate.engines.embedded.lane import Lane
from tidegate.engines.embedded.loading import BaseModel, choose_dtype, load_base
from tidegate.engines.embedded.prefixes import PrefixStore
from tidegate.engines.embedded.residents import Residents
from tidegate.engines.embedded.rows import Call, Vocabulary, rows_of
from tidegate.engines.embedded.sampling import RowSampler, choice_stream
from tidegate.engines.embedded.worker import DecodeWorker, Mailbox
from tidegate.engines.model_cache import base_hash
from tidegate.ports.engine import EngineHealth, ProbeResult

_SEED_BITS = 63


class _Running:
    """What exists between start and close."""

    def __init__(self, base: BaseModel, vocabulary: Vocabulary, worker: DecodeWorker, residents: Residents) -> None:
        self.base = base
        self.vocabulary = vocabulary
        self.worker = worker
        self.residents = residents
        self.grammars = Grammars(base.tokenizer, vocabulary_size=base.vocabulary_size, end_ids=base.end_ids)


class EmbeddedEngine:
    """Serves one base model and its adapters; implements :class:`tidegate.ports.engine.Engine`.

    Args:
        model_dir: directory of the base model (see :func:`tidegate.engines.model_cache.resolve_model`).
        dtype: ``auto``, ``float32`` or ``bfloat16``.
        max_batch: most choices of one adapter decoded together.
        max_queue: most choices waiting over all adapters.
        max_context: longest prompt plus completion, in tokens; the model's own limit applies as well.
        max_resident_adapters: most merged copies in memory, the base not counted.
        threads: compute threads; 0 takes all processors.
        replica: name recorded with each interaction.
        slot_bytes: memory for the keys and values of one adapter's running rows; rows beyond it wait.
        prefix_cache_tokens: tokens whose keys and values are kept for prompts that begin the same way; 0 is off.
        entropy: seeds requests that name no seed; default: the operating system's.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        dtype: str = "auto",
        max_batch: int = 32,
        max_queue: int = 256,
        max_context: int = 2048,
        max_resident_adapters: int = 4,
        threads: int = 0,
        replica: str = "embedded-0",
        slot_bytes: int = 2 << 30,
        prefix_cache_tokens: int = 16384,
        entropy: random.Random | None = None,
    ) -> None:
        self._model_dir = model_dir
        self._dtype = dtype
        self._max_batch = max_batch
        self._max_queue = max_queue
        self._max_context = max_context
        self._max_resident = max_resident_adapters
        self._threads = threads
        self._replica = replica
        self._slot_bytes = slot_bytes
        self._store = PrefixStore(prefix_cache_tokens)
        self._entropy = entropy or random.SystemRandom()
        self._base_sha256: str | None = None
        self._state: _Running | None = None
        self._closed = False

    @property
    def replica(self) -> str:
        """Name of this replica."""
        return self._replica

    @property
    def base_sha256(self) -> str:
        """Content hash of the base model's weights; computed at the first call."""
        if self._base_sha256 is None:
            self._base_sha256 = base_hash(self._model_dir)
        return self._base_sha256

    async def start(self) -> None:
        """Load the base model and start the decode thread. A second call is a no-op.

        Raises:
            ModelError: the model cannot be served.
            EngineError: the engine was closed.
        """
        if self._closed:
            raise EngineError("the embedded engine was closed; make a new one")
        if self._state is not None:
            return
        base = await asyncio.to_thread(self._load)
        vocabulary = Vocabulary(base.tokenizer, base.end_ids)
        worker = DecodeWorker(max_queue=self._max_queue, threads=self._threads)
        lane = self._lane(base, base.runner, vocabulary)

        def build(weights: LoraWeights) -> Lane:
            return self._lane(base, Runner(merged_model(base.runner.model, weights)), vocabulary)

        residents = Residents(base=lane, max_resident=self._max_resident, build=build, worker=worker)
        worker.start()
        self._state = _Running(base, vocabulary, worker, residents)

    async def close(self, *, drain: bool = False, timeout_s: float = 30.0) -> None:
        """End the decode thread; calls that run end first when ``drain``, else they fail with EngineError.

        Raises:
            EngineError: the thread did not end within ``timeout_s``.
        """
        self._closed = True
        state, self._state = self._state, None
        if state is not None:
            state.grammars.close()
        if state is not None and not await asyncio.to_thread(state.worker.close, drain=drain, timeout_s=timeout_s):
            raise EngineError(f"the decode thread did not end within {timeout_s:g} s; it ends with the process")

    async def __aenter__(self) -> EmbeddedEngine:
        """Start."""
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close without draining."""
        await self.close()

    async def load(self, adapter: AdapterRef) -> None:
        """Check an adapter, merge it into a copy of the base, and make it nameable.

        Raises:
            AdapterError: the files are not those of ``adapter``, do not fit this base, or the name is taken.
            EngineBusyError: all resident adapters are in use.
        """
        state = self._running()
        if state.residents.known(adapter):
            return

        def read() -> LoraWeights:
            return read_adapter(adapter, base_sha256=self.base_sha256, model=state.base.runner.model)

        await state.residents.add(await asyncio.to_thread(read))

    async def unload(self, name: str) -> None:
        """Forget an adapter once no running request uses it. Unknown names are a no-op."""
        await self._running().residents.remove(name)

    async def list_adapters(self) -> tuple[AdapterRef, ...]:
        """The adapters that can be named in a request now."""
        return self._running().residents.refs()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent]:
        """Stream one call; closing the iterator cancels it at the next token boundary.

        Raises:
            AdapterError: ``request.adapter`` is not loaded.
            RequestError: the prompt leaves no room for one token, the template refuses the messages, or the answer
                can't be held to its JSON schema or its tools.
            EngineBusyError: the queue is full.
            EngineError: the engine failed or was closed.
        """
        state = self._running()
        with state.residents.holding(request.adapter) as held:
            lane = await state.residents.lane(held)
            prompt = await asyncio.to_thread(encode_prompt, state.base.tokenizer, request.messages, request.tools)
            limit = self._token_limit(state, prompt, request)
            samplers = await self._samplers(state, request)
            mailbox = Mailbox(state.worker, asyncio.get_running_loop())
            call = Call(request=request, prompt=prompt, post=mailbox.post, open_choices=request.sampling.n)
            rows = rows_of(call, limit=limit, samplers=samplers, vocabulary=state.vocabulary)
            state.worker.submit(lane, rows)
            left = len(rows)
            try:
                yield PromptTokens(token_ids=prompt)
                while left:
                    event = await mailbox.get()
                    left -= isinstance(event, ChoiceEnd)
                    yield event
            finally:
                if left:
                    call.cancelled = True
                    state.worker.wake()

    async def probe(self, name: str, *, against: str | None, prompts: Sequence[Messages]) -> ProbeResult:
        """Largest difference of next-token logits between two sets of weights, computed without any cache.

        Raises:
            AdapterError: one of them is not loaded.
            RequestError: no prompt was given, or one is longer than the context.
        """
        state = self._running()
        if not prompts:
            raise RequestError("a probe needs at least one prompt")
        sha256 = state.residents.ref(name).sha256
        difference = 0.0
        with state.residents.holding(name) as one, state.residents.holding(against) as other:
            lanes = [await state.residents.lane(held) for held in (one, other)]
            for messages in prompts:
                token_ids = encode_prompt(state.base.tokenizer, messages, ())
                self._refuse_too_long(state, len(token_ids))
                # both at the same token boundary: running answers wait once, and the swap not for two of their steps
                computed = [
                    state.worker.run(lambda runner=lane.runner, ids=token_ids: runner.plain_logits(ids, last=1))
                    for lane in lanes
                ]
                one_side, other_side = [await asyncio.wrap_future(future) for future in computed]
                difference = max(difference, float((one_side - other_side).abs().max()))
        return ProbeResult(name=name, sha256=sha256, max_logit_difference=difference)

    async def sequence_logprobs(
        self, adapter: str | None, token_ids: Sequence[int], *, first: int = 1
    ) -> tuple[float, ...]:
        """Log-probability of each token from index ``first`` on given those before it, by one pass without a cache.

        Raises:
            AdapterError: ``adapter`` is not loaded.
            RequestError: ``first`` is not in [1, T), or the sequence is longer than the context.
        """
        state = self._running()
        given = list(token_ids)
        require_scorable(first, len(given))
        self._refuse_too_long(state, len(given) - 1)
        wanted = len(given) - first

        def compute(runner: Runner) -> tuple[float, ...]:
            logprobs = torch.log_softmax(runner.plain_logits(given[:-1], last=wanted), dim=-1)
            return tuple(logprobs.gather(1, torch.tensor(given[first:])[:, None])[:, 0].tolist())

        with state.residents.holding(adapter) as held:
            lane = await state.residents.lane(held)
            return await asyncio.wrap_future(state.worker.run(lambda: compute(lane.runner)))

    async def health(self) -> EngineHealth:
        """Whether requests would be served now."""
        if self._state is None:
            return EngineHealth(ready=False, detail="closed" if self._closed else "not started", queued=0, running=0)
        worker = self._state.worker
        queued, running = worker.counts()
        detail = f"last error: {worker.last_error}" if worker.last_error else "serving"
        return EngineHealth(ready=worker.alive, detail=detail, queued=queued, running=running)

    def _load(self) -> BaseModel:
        base = load_base(self._model_dir, choose_dtype(self._dtype))
        _ = self.base_sha256
        return base

    def _lane(self, base: BaseModel, runner: Runner, vocabulary: Vocabulary) -> Lane:
        slots = base.shape.slots(max_rows=self._max_batch, max_columns=self._context(base))
        return Lane(
            runner=runner,
            slots=slots,
            store=self._store,
            vocabulary=vocabulary,
            max_rows=self._max_batch,
            max_bytes=self._slot_bytes,
        )

    def _running(self) -> _Running:
        if self._state is None:
            raise EngineError(f"the embedded engine is {'closed' if self._closed else 'not started; await start()'}")
        return self._state

    def _context(self, base: BaseModel) -> int:
        return min(self._max_context, base.max_positions)

    def _refuse_too_long(self, state: _Running, length: int) -> None:
        context = self._context(state.base)
        if length >= context:
            raise RequestError(
                f"the prompt has {length} tokens, but prompt and completion together may have {context}; "
                "shorten the messages or raise model.max_context"
            )

    def _token_limit(self, state: _Running, prompt: Sequence[int], request: GenerationRequest) -> int:
        self._refuse_too_long(state, len(prompt))
        if not prompt:
            raise RequestError("the chat template makes no tokens of these messages; send at least one message")
        if request.sampling.n > self._max_queue:
            raise RequestError(f"n = {request.sampling.n} exceeds model.max_queue = {self._max_queue}; ask for fewer")
        return min(request.sampling.max_tokens, self._context(state.base) - len(prompt))

    async def _samplers(self, state: _Running, request: GenerationRequest) -> list[RowSampler]:
        sampling = request.sampling
        held: Sequence[Constraint | None] = [None] * sampling.n
        form = form_of(request)
        if form is not None:
            held = await state.grammars.constraints(form, sampling.n)
        seed = self._entropy.getrandbits(_SEED_BITS) if sampling.seed is None else sampling.seed
        return [
            RowSampler(sampling=sampling, stream=choice_stream(seed, index), constraint=constraint)
            for index, constraint in enumerate(held)
        ]

"""Asking one adapter every task: the same prompts, seeds and decoding for each arm.

Failures are attributed, never swallowed. An engine error, a timeout, a broken environment or a verifier that
gives no verdict in time or cannot work here at all ends that episode as a failed answer whose ``error`` says so:
it was cut short. A verifier that raises on an answer has seen it: a failed answer whose ``error`` starts with
``verifier:``. What such answers count for is :mod:`tidegate.core.gate.evidence`'s rule.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

from tidegate.core.errors import EngineError, GateError, TidegateError
from tidegate.core.generation import collect
from tidegate.core.hashing import content_hash
from tidegate.core.refusals import is_refusal
from tidegate.core.rollout import Transcript, run_episode
from tidegate.core.types import (
    VERIFIER_ERROR,
    Answer,
    Choice,
    FinishReason,
    GenerationRequest,
    Messages,
    Outcome,
    Sampling,
    Task,
)
from tidegate.ports import Engine, Environment, Verifier
from tidegate.ports.signals import VERIFIER_ERROR as JUDGED_ERROR
from tidegate.ports.signals import Judgement

SamplingOf: TypeAlias = Callable[[Task, int], Sampling]
"""Decoding settings, seed included, of a task's call with the given number."""

OnAnswer: TypeAlias = Callable[[Answer], Awaitable[None]]
Clock: TypeAlias = Callable[[], float]

_SEED_BITS = 31  # what every engine accepts


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One finished model call, token-exact: what was asked, in messages and in the engine's tokens, and the answer.

    ``replica`` is the one that answered, None where the engine has one only.
    """

    messages: Messages
    sampling: Sampling
    prompt_token_ids: tuple[int, ...]
    choice: Choice
    replica: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """An answer and what it came from. ``judgement`` is None where the verifier gave none."""

    answer: Answer
    calls: tuple[Call, ...]
    judgement: Judgement | None


class _EnvironmentError(Exception):
    """An environment raised instead of answering with an error text."""


class _NoVerdictError(Exception):
    """Nothing was found out about the answer."""


class _RaisedError(Exception):
    """The verifier raised on the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grading:
    """How answers are run and scored.

    ``max_calls`` model calls an episode, ``concurrency`` episodes in flight, ``timeout_s`` seconds an episode;
    ``clock`` counts seconds.
    """

    verifiers: Mapping[str, Verifier]
    environments: Mapping[str, Environment]
    max_calls: int
    concurrency: int
    timeout_s: float
    clock: Clock

    def check(self, tasks: Sequence[Task]) -> None:
        """Refuse to start when a task needs something that is not registered.

        Raises:
            GateError: names the task, what it needs and what there is.
        """
        for task in tasks:
            if task.verifier not in self.verifiers:
                raise GateError(
                    f"task {task.id!r} needs the verifier {task.verifier!r}; registered: {sorted(self.verifiers)!r}"
                )
            if task.environment is not None and task.environment not in self.environments:
                raise GateError(
                    f"task {task.id!r} needs the environment {task.environment!r}; "
                    f"registered: {sorted(self.environments)!r}"
                )

    def graded(self, tasks: Sequence[Task]) -> list[str]:
        """Names of those verifiers of ``tasks`` that grade."""
        return sorted(name for name in {task.verifier for task in tasks} if self.verifiers[name].graded)

    def fingerprint(self, tasks: Sequence[Task]) -> dict[str, Any]:
        """What decides how an answer to ``tasks`` is scored, as JSON; ``tasks`` have passed :meth:`check`.

        Environments carry no version; the hash of the tools that they offer stands for one.
        """
        verifiers = sorted({task.verifier for task in tasks})
        environments = sorted({task.environment for task in tasks if task.environment is not None})
        return {
            "max_calls": self.max_calls,
            "timeout_s": self.timeout_s,
            "verifiers": {name: self.verifiers[name].version for name in verifiers},
            "graded": self.graded(tasks),
            "environments": {name: content_hash(list(self.environments[name].tools)) for name in environments},
        }


def call_seed(epoch_seed: str, task_id: str, call_number: int) -> int:
    """Seed in [0, 2^31) of one call: equal for every arm, different for every task and call."""
    digest = hashlib.sha256(f"{epoch_seed}\n{task_id}\n{call_number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - _SEED_BITS)


async def evaluate(
    engine: Engine,
    adapter: str | None,
    adapter_sha256: str,
    tasks: Sequence[Task],
    *,
    sampling: SamplingOf,
    grading: Grading,
    on_answer: OnAnswer | None = None,
) -> list[Answer]:
    """Answer every task once.

    Args:
        engine: serves the adapter.
        adapter: name that the engine knows it by; None for the bare base model.
        adapter_sha256: content hash that the answers are filed under.
        tasks: what is asked.
        sampling: decoding settings of each call.
        grading: limits, verifiers and environments.
        on_answer: awaited after each answer, in order of completion.

    Returns:
        One answer a task, in the order of ``tasks``.

    Raises:
        GateError: a task needs a verifier or environment that is not registered.
    """
    evaluated = await evaluate_episodes(
        engine, adapter, adapter_sha256, tasks, sampling=sampling, grading=grading, on_answer=on_answer
    )
    return [episode.answer for episode in evaluated]


async def evaluate_episodes(
    engine: Engine,
    adapter: str | None,
    adapter_sha256: str,
    tasks: Sequence[Task],
    *,
    sampling: SamplingOf,
    grading: Grading,
    on_answer: OnAnswer | None = None,
) -> list[Evaluated]:
    """As :func:`evaluate`, with the calls and the judgement behind each answer."""
    grading.check(tasks)
    slots = asyncio.Semaphore(grading.concurrency)

    # A pool of its own: verifiers that hang would fill one that is shared. Threads start on demand, so that the
    # room for every task is only used where verifiers do hang.
    judges = ThreadPoolExecutor(max_workers=max(len(tasks), 1), thread_name_prefix="judge")

    async def answer(task: Task) -> Evaluated:
        async with slots:
            result = await _answer(engine, adapter, adapter_sha256, task, judges, sampling=sampling, grading=grading)
        if on_answer is not None:
            await on_answer(result.answer)
        return result

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(answer(task)) for task in tasks]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures  # the first one ended the others; callers expect it bare
    finally:
        judges.shutdown(wait=False, cancel_futures=True)
    return [task.result() for task in running]


async def _answer(
    engine: Engine,
    adapter: str | None,
    adapter_sha256: str,
    task: Task,
    judges: Executor,
    *,
    sampling: SamplingOf,
    grading: Grading,
) -> Evaluated:
    started = grading.clock()
    calls: list[Call] = []

    def answered(
        transcript: Transcript | None, *, judgement: Judgement | None = None, error: str | None = None
    ) -> Evaluated:
        said = transcript or Transcript(messages=(), choices=())
        counting = None if said.no_reply else judgement
        answer = Answer(
            task_id=task.id,
            adapter_sha256=adapter_sha256,
            seed=sampling(task, 0).seed or 0,
            passed=counting is not None and counting.outcome is Outcome.PASS,
            score=0.0 if counting is None else counting.score,
            no_reply=transcript is not None and said.no_reply,
            invalid_tool_call=said.invalid_tool_call,
            refused=not said.tools and is_refusal(said.text),
            tokens=said.tokens,
            seconds=seconds,
            text=said.text,
            tools=said.tools,
            surprisal=said.surprisal,
            error=error,
        )
        return Evaluated(answer=answer, calls=tuple(calls), judgement=judgement)

    async def complete(messages: Messages, call_number: int) -> Choice:
        request = GenerationRequest(
            request_id=f"gate-{adapter_sha256[:8]}-{task.id}-{call_number}",
            messages=messages,
            tools=task.tools,
            sampling=sampling(task, call_number),
            adapter=adapter,
        )
        call = await _first_choice(engine, request)
        calls.append(call)
        return call.choice

    environment = None if task.environment is None else _Guarded(grading.environments[task.environment])
    transcript, cut = None, ""
    try:
        async with asyncio.timeout(grading.timeout_s):
            transcript = await run_episode(task, complete, environment, max_calls=grading.max_calls)
    except TimeoutError:
        cut = f"timeout: no answer within {grading.timeout_s:g} s"
    except _EnvironmentError as error:
        cut = f"environment: {error}"
    except TidegateError as error:
        cut = f"engine: {error}"
    seconds = max(grading.clock() - started, 0.0)
    if transcript is None:
        return answered(None, error=cut)
    try:
        judgement = await _judgement(task, transcript, judges, grading)
    except _NoVerdictError as error:
        return answered(transcript, error=f"no verdict: {task.verifier} {error}")
    except _RaisedError as error:
        return answered(transcript, error=f"{VERIFIER_ERROR} {task.verifier} {error}")
    return answered(transcript, judgement=judgement)


async def _judgement(task: Task, transcript: Transcript, judges: Executor, grading: Grading) -> Judgement:
    """What the task's verifier says.

    Raises:
        _NoVerdictError: it took too long or says on purpose that it cannot work here. Load on the machine or a
            missing package must not look like an arm's own wrong answer.
        _RaisedError: it raised anything else, or says that its scorer did.
    """
    verifier = grading.verifiers[task.verifier]

    def judge() -> Judgement | Exception:
        try:
            return verifier.judge(task, transcript.messages)
        except Exception as error:  # noqa: BLE001 - foreign code; its failure belongs to this answer alone
            return error

    try:
        async with asyncio.timeout(grading.timeout_s):
            result = await asyncio.get_running_loop().run_in_executor(judges, judge)
    except TimeoutError:
        raise _NoVerdictError(f"gave none within {grading.timeout_s:g} s") from None
    if isinstance(result, TidegateError | TimeoutError):
        raise _NoVerdictError(f"raised {result!r}") from result
    if isinstance(result, Exception):
        raise _RaisedError(f"raised {result!r}") from result
    if result.detail.partition(":")[0] == JUDGED_ERROR:
        raise _RaisedError(f"says {result.detail!r}")
    return result


async def _first_choice(engine: Engine, request: GenerationRequest) -> Call:
    """The call with its first answer, as the engine computed it."""
    fold = await collect(engine.generate(request))
    choices = fold.choices()
    if not choices or choices[0].finish_reason is FinishReason.CANCELLED:
        raise EngineError(f"the engine ended request {request.request_id!r} without finishing its answer")
    return Call(
        messages=request.messages,
        sampling=fold.as_sampled(request.sampling),
        prompt_token_ids=fold.prompt_token_ids,
        choice=choices[0],
        replica=fold.replica,
    )


class _Guarded:
    """An environment whose exceptions keep their origin."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def execute(self, name: str, arguments: str) -> str:
        """Run a tool."""
        try:
            return self._environment.execute(name, arguments)
        except Exception as error:
            raise _EnvironmentError(f"{self._environment.name} raised {error!r}") from error

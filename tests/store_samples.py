"""Small records for the tests of stores and capture. Log-probabilities are float32, as they are stored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tidegate.core.shadow import ShadowAnswer, ShadowOutcome
from tidegate.core.types import (
    Answer,
    Candidate,
    CandidateState,
    Choice,
    Feedback,
    FinishReason,
    Interaction,
    Outcome,
    Release,
    Sampling,
    Split,
    Task,
    Verdict,
)

TASK = Task(
    id="t1",
    messages=({"role": "user", "content": "2+2?"},),
    tools=({"type": "function", "function": {"name": "calc", "parameters": {}}},),
    verifier="numeric",
    reference={"answer": 4},
    kind="sum",
    environment="calculator",
    json_schema='{"type":"object","properties":{"z":{},"a":{}}}',
    tool_choice="calc",
)


def interaction(id_: str = "i1", *, episode: str = "e1", at: float = 1.0, **changes: Any) -> Interaction:
    """One record with two choices, tools and text in several scripts."""
    base = Interaction(
        id=id_,
        episode_id=episode,
        user_key="u1",
        split=Split.TRAIN,
        created_at=at,
        messages=({"role": "user", "content": "grüß dich 👋\x00", "name": "a"},),
        tools=({"type": "function", "function": {"name": "calc", "description": "d"}},),
        sampling=Sampling(temperature=0.7, stop=("\n",), seed=2**80, n=2),
        prompt_token_ids=(1, 2, 49151),
        choices=(
            Choice(index=0, token_ids=(5, 6), logprobs=(-0.5, -1.25), text="hi"),
            Choice(
                index=1,
                token_ids=(7,),
                logprobs=(),
                text="",
                tool_calls=({"id": "call_1", "type": "function", "function": {"name": "calc", "arguments": "{}"}},),
                finish_reason=FinishReason.TOOL_CALLS,
                invalid_tool_call=True,
            ),
        ),
        release_id="smol-r1-abcd1234",
        engine_replica="embedded-0",
        latency_s=0.25,
        task=TASK,
    )
    return replace(base, **changes)


def feedback(
    id_: str = "f1", *, interaction_id: str | None = None, episode_id: str | None = None, **changes: Any
) -> Feedback:
    """Feedback about an interaction or an episode."""
    base = Feedback(
        id=id_,
        metric_name="thumb",
        value=True,
        interaction_id=interaction_id,
        episode_id=episode_id,
        tags={"by": "test"},
        created_at=5.0,
    )
    return replace(base, **changes)


def verdict(episode: str = "e1", **changes: Any) -> Verdict:
    """A passing verdict."""
    base = Verdict(
        episode_id=episode,
        verifier="numeric",
        version="1",
        outcome=Outcome.PASS,
        score=1.0,
        detail="4 = 4",
        seconds=0.001,
        created_at=9.0,
    )
    return replace(base, **changes)


def candidate(id_: str = "cand-aaaaaaaa", **changes: Any) -> Candidate:
    """A proposed candidate."""
    base = Candidate(
        id=id_,
        adapter_sha256="a" * 64,
        base_sha256="b" * 64,
        manifest_hash=None,
        parent_sha256=None,
        state=CandidateState.PROPOSED,
        created_at=3.0,
        origin="cycle",
    )
    return replace(base, **changes)


def release(number: int = 0, **changes: Any) -> Release:
    """A release of the bare base model (number 0) or of an adapter."""
    base = Release(
        id=f"smol-r{number}",
        number=number,
        adapter_sha256=None if number == 0 else f"{number:064x}",
        base_sha256="b" * 64,
        certificate=None if number == 0 else {"signature": "s", "n": number},
        created_at=float(number),
    )
    return replace(base, **changes)


def answer(task_id: str = "t1", **changes: Any) -> Answer:
    """A passed answer."""
    base = Answer(
        task_id=task_id,
        adapter_sha256="a" * 64,
        seed=2**70,
        passed=True,
        score=1.0,
        no_reply=False,
        invalid_tool_call=False,
        refused=False,
        tokens=12,
        seconds=0.5,
        text="grüß dich",
        tools=("calc",),
        surprisal=1.5,
    )
    return replace(base, **changes)


def shadow_answer(interaction_id: str = "i1", **changes: Any) -> ShadowAnswer:
    """What the first shadow made of an interaction, in a script and with a half of a pair."""
    base = ShadowAnswer(
        shadow_id="shadow-1",
        interaction_id=interaction_id,
        release_id="smol-r0-base",
        engine_replica="embedded-0",
        created_at=2.0,
        outcome=ShadowOutcome.ANSWERED,
        seconds=0.125,
        text="grüß dich \ud83d\x00",
        tool_calls=({"id": "call_9", "type": "function", "function": {"name": "calc", "arguments": "{}"}},),
        finish_reason=FinishReason.TOOL_CALLS,
        invalid_tool_call=True,
        prompt_tokens=3,
        completion_tokens=4,
    )
    return replace(base, **changes)

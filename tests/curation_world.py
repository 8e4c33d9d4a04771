"""Small episodes, verdicts and demonstrations to curate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tidegate.config.settings import CurationSettings
from tidegate.core.selection.demonstrations import demonstration_example
from tidegate.core.types import (
    Choice,
    Episode,
    Example,
    Feedback,
    Interaction,
    JsonObject,
    Messages,
    Outcome,
    Sampling,
    Split,
    Task,
    Verdict,
)
from tidegate.curation import Batch, curate
from tidegate.ports.signals import Judgement

TASK = Task(id="t", messages=({"role": "user", "content": "1 + 1?"},), verifier="says", reference="2", kind="sums")


class Says:
    """Passes when the last message is the reference."""

    def __init__(self) -> None:
        self.name = "says"
        self.version = "1"

    def check_reference(self, reference: Any) -> None:
        if not isinstance(reference, str):
            raise ValueError("a text")

    def judge(self, task: Task, transcript: Sequence[JsonObject]) -> Judgement:
        passed = transcript[-1]["content"] == task.reference
        return Judgement(outcome=Outcome.PASS if passed else Outcome.FAIL, score=float(passed), detail="")


def call(identifier: str, *, tokens: tuple[int, ...] = (7, 2), **changes: Any) -> Interaction:
    choice = Choice(index=0, token_ids=tokens, logprobs=tuple(-0.5 for _ in tokens), text="2")
    base = Interaction(
        id=identifier,
        episode_id="e",
        user_key="u",
        split=Split.TRAIN,
        created_at=1.0,
        messages=TASK.messages,
        tools=(),
        sampling=Sampling(),
        prompt_token_ids=(5, 6),
        choices=(choice,),
        release_id="r0",
        engine_replica="e0",
        latency_s=0.1,
        task=TASK,
    )
    return replace(base, **changes)


def said(identifier: str, text: str, **changes: Any) -> Interaction:
    """A call whose tokens are those of ``text``."""
    made = call(identifier, tokens=(*(ord(letter) + 10 for letter in text), 2), **changes)
    return replace(made, choices=(replace(made.choices[0], text=text),))


def episode(identifier: str, *calls: Interaction, user: str = "u", split: Split = Split.TRAIN) -> Episode:
    return Episode(
        id=identifier, user_key=user, split=split, interactions=calls or (call(f"i-{identifier}", split=split),)
    )


def verdict(identifier: str, score: float = 1.0, **changes: Any) -> Verdict:
    base = Verdict(
        episode_id=identifier,
        verifier="says",
        version="1",
        outcome=Outcome.PASS if score >= 1 else Outcome.FAIL,
        score=score,
        detail="",
        seconds=0.0,
        created_at=1.0,
    )
    return replace(base, **changes)


def shown(identifier: str, value: Any = None, **changes: Any) -> Feedback:
    base = Feedback(
        id=identifier,
        metric_name="demonstration",
        value=[{"role": "assistant", "content": "2"}] if value is None else value,
        interaction_id=None,
        episode_id="e",
        tags={},
        created_at=1.0,
    )
    return replace(base, **changes)


def run(
    episodes: Sequence[Episode], verdicts: Sequence[Verdict], feedback: Sequence[Feedback] = (), **options: Any
) -> Batch:
    settings = CurationSettings(**options.pop("settings", {}))
    options = {"seed": 0, "now": 1.0, "verifiers": {"says": Says()}} | options
    return curate(episodes, verdicts, feedback, settings=settings, **options)


def reasons(batch: Batch) -> dict[str, str]:
    return {item["id"]: item["reason"] for item in batch.manifest["items"]}


def task_demonstration(task: Task, answer: Messages) -> Example:
    """The example of a task and the messages that solve it; its id is the task's with ``demonstration/``."""
    return demonstration_example(
        f"demonstration/{task.id}", opening=task.messages, tools=task.tools, answer=answer, kind=task.kind
    )

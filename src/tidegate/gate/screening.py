"""What the engine shows of a candidate on tasks that anybody may see."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tidegate.core.errors import GateError
from tidegate.core.gate.evidence import encode_pairs, paired
from tidegate.core.gate.screen import ReferenceKl
from tidegate.core.hashing import content_hash
from tidegate.core.types import Task
from tidegate.gate.arms import Arm, loaded, logit_difference
from tidegate.gate.asking import decoding_from_json, seeded
from tidegate.gate.collecting import Collector
from tidegate.gate.evaluate import Call
from tidegate.ports import Engine

_LARGEST_LOG_RATIO = 50.0
MAX_KL_CALLS = 64
"""Most calls that the divergence is measured on; each costs two forward passes over its prompt and answer."""


async def screen_evidence(
    engine: Engine,
    collector: Collector,
    given: Mapping[str, Any],
    *,
    challenger: Arm,
    champion: Arm,
    reference: Arm | None,
    dev: Sequence[Task],
    canary_prompts: Sequence[Task],
) -> dict[str, Any]:
    """The measured fields of a ``screen`` record.

    Args:
        engine: evaluates.
        collector: asks on ``engine``.
        given: the record's other fields.
        challenger: the candidate's adapter.
        champion: what serves now.
        reference: whose distribution the challenger's answers are measured against; None: not measured.
        dev: tasks that both are asked at the traffic's decoding.
        canary_prompts: tasks that the challenger is asked greedily.

    Raises:
        GateError: the probe or the measurement failed.
        EngineError: an adapter can't be loaded.
    """
    if challenger.sha256 == champion.sha256:  # the screen fails for that alone
        nothing = encode_pairs(paired([], challenger={}, champion={}))
        return {"logit_difference": 0.0, "canary_prompts": [], "kl": None, "outcomes": nothing}
    decoding, seed = decoding_from_json(given["decoding"]), given["seeds"]["seed"]
    sampling, greedy = seeded(decoding, seed), seeded(replace(decoding, temperature=0.0), seed)
    async with loaded(engine, challenger, champion):
        difference = await logit_difference(engine, challenger, champion, [*dev, *canary_prompts])
        prompts = await collector.answers("canary prompts", challenger, canary_prompts, greedy)
        episodes = await collector.episodes("challenger", challenger, dev, sampling)
        theirs = await collector.answers("champion", champion, dev, sampling)
        ours = {task_id: episode.answer for task_id, episode in episodes.items()}
        calls = measured_calls(
            {task_id: episode.calls for task_id, episode in episodes.items()}, salt=challenger.sha256
        )
        kl = None if reference is None else await reference_kl(engine, challenger, reference, calls)
    return {
        "logit_difference": difference,
        "canary_prompts": [[task_id, answer.passed] for task_id, answer in sorted(prompts.items())],
        "kl": None if kl is None else kl.to_json(),
        "outcomes": encode_pairs(paired(dev, challenger=ours, champion=theirs)),
    }


def measured_calls(calls: Mapping[str, Sequence[Call]], *, salt: str) -> list[Call]:
    """The calls that a divergence is measured on: at most ``MAX_KL_CALLS``, one a task before a second one of any.

    Which tasks come first follows from a hash of their ids with ``salt``; with the candidate's own content hash as the
    salt, nobody can train a candidate that behaves on just those. Calls without a sampled token are left out, and those
    whose answer was held to a schema or a tool: they are no samples of the weights' own distribution.

    Args:
        calls: by task id, in the order of each episode.
        salt: of the order.
    """
    usable = {
        task_id: [call for call in made if call.choice.token_ids and not call.sampling.constrained]
        for task_id, made in calls.items()
    }
    order = sorted(usable, key=lambda task_id: content_hash([salt, task_id]))
    rounds = max(map(len, usable.values()), default=0)
    ordered = [usable[task_id][turn] for turn in range(rounds) for task_id in order if turn < len(usable[task_id])]
    return ordered[:MAX_KL_CALLS]


async def reference_kl(engine: Engine, challenger: Arm, reference: Arm, calls: Sequence[Call]) -> ReferenceKl | None:
    """Estimate KL(challenger || reference) in nats per token, on the challenger's own answers.

    The mean over sampled tokens of k3 = r - 1 - log r with r the reference's probability over the challenger's
    (Schulman 2020, "Approximating KL divergence"): never negative, and unbiased when the answers were sampled at
    temperature 1 from the whole distribution; at other settings a measure of distance on what the traffic gets to
    see. Both sides are computed anew, in the same way, so that no difference of batches or sampling enters.

    Args:
        engine: has the challenger loaded; the reference is loaded while it is needed.
        challenger: whose answers ``calls`` holds.
        reference: the release that it is compared with.
        calls: as :func:`measured_calls` chooses them.

    Returns:
        None without a call.

    Raises:
        GateError: a log-probability is not finite.
        EngineError: the reference can't be loaded or the engine failed.
    """
    if not calls:
        return None
    total = 0.0
    async with loaded(engine, reference):
        for call in calls:
            token_ids = (*call.prompt_token_ids, *call.choice.token_ids)
            first = len(call.prompt_token_ids)
            ours = await engine.sequence_logprobs(challenger.name, token_ids, first=first)
            theirs = await engine.sequence_logprobs(reference.name, token_ids, first=first)
            total += sum(_k3(their - our) for our, their in zip(ours, theirs, strict=True))
    tokens = sum(len(call.choice.token_ids) for call in calls)
    if not math.isfinite(total):
        raise GateError(
            f"the divergence of {challenger.name!r} from {reference.name or 'the base model'!r} over {tokens} tokens "
            f"is {total!r}; a finite number is expected: one of the two gives log-probabilities that are not finite"
        )
    return ReferenceKl(
        nats_per_token=total / tokens, tokens=tokens, calls=len(calls), reference_sha256=reference.sha256
    )


def _k3(log_ratio: float) -> float:
    """r - 1 - log r for a log r.

    Beyond ``_LARGEST_LOG_RATIO``, which is beyond any budget, it is held there: a challenger that is so far off is to
    fail the screen, not to keep it from ending.
    """
    held = min(log_ratio, _LARGEST_LOG_RATIO) if math.isfinite(log_ratio) else log_ratio
    return math.expm1(held) - held

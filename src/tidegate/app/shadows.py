"""Releases in the shadow, as the commands see them: started and stopped over the admin API, and what came of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tidegate.app.operations import existing, iso_time
from tidegate.app.publishing import RemotePublisher
from tidegate.app.stores import open_stores
from tidegate.config import Settings
from tidegate.core.errors import CommandError, ConflictError, NotFoundError
from tidegate.core.shadow import SHADOW_ENDED, ShadowOutcome, ShadowPair, ended_body, last_run
from tidegate.core.shadow_report import calls_by_outcome, comparisons
from tidegate.core.types import Choice, Episode, JsonObject, Outcome
from tidegate.ports import Verifier
from tidegate.signals import builtin_verifiers, score_episodes

MAX_PAIRS = 20_000
"""Pairs that a report reads, the latest ones: some 200 MB of records at 10 kB each."""


async def start_shadow(settings: Settings, release_id: str, share: float) -> JsonObject:
    """Put a release into the shadow of the running server.

    Raises:
        CommandError: no server runs, or it refuses.
        ConflictError, NotFoundError, CertificateError, AdapterError: as the server says.
    """
    directory = existing(settings)
    address = directory.server()
    if address is None:
        raise CommandError(
            f"no server runs on data directory {str(settings.data_dir)!r}, and only a server has calls to copy; start "
            "'tidegate serve'"
        )
    return await RemotePublisher(address, directory.admin_token()).start_shadow(release_id, share)


async def stop_shadow(settings: Settings, reason: str) -> JsonObject:
    """End the shadow; without a server the log says so to the next one.

    Raises:
        ConflictError: no release is in the shadow.
        CommandError: the server refuses for another reason.
    """
    directory = existing(settings)
    address = directory.server()
    if address is not None:
        return await RemotePublisher(address, directory.admin_token()).stop_shadow(reason)
    with open_stores(directory) as stores:
        last = last_run(stores.audit.read())
        if last is None or last.ended is not None:
            raise ConflictError("no release is in the shadow; there is none to stop")
        body = ended_body(last.shadow, reason)
        stores.audit.append(SHADOW_ENDED, body, time=time.time())
    return body


def shadow_report(settings: Settings) -> JsonObject:
    """What came of the shadow that runs, or of the last one.

    Raises:
        NotFoundError: there never was one.
    """
    with open_stores(existing(settings)) as stores:
        last = last_run(stores.audit.read())
        if last is None:
            raise NotFoundError(
                "no release was ever in the shadow; 'tidegate releases shadow RELEASE --share 0.1' begins one"
            )
        counts = stores.shadows.count_shadow_answers(last.shadow.id)
        pairs = stores.shadows.list_shadow_pairs(last.shadow.id, latest=MAX_PAIRS)
    recorded = sum(count for (outcome, _), count in counts.items() if outcome is not ShadowOutcome.DROPPED)
    return {
        "shadow": last.shadow.id,
        "release": last.shadow.release_id,
        "share": last.shadow.share,
        "started_at": iso_time(last.started_at),
        "ended": last.ended,
        "calls": calls_by_outcome(counts),
        "left_out": max(0, recorded - len(pairs)),
        "comparisons": comparisons(pairs, passed(pairs, builtin_verifiers(), clock=time.time)),
    }


def passed(
    pairs: Sequence[ShadowPair], verifiers: Mapping[str, Verifier], *, clock: Callable[[], float]
) -> dict[str, tuple[bool, bool]]:
    """Whether the user's answer and the shadow's pass, by interaction, where a program can say so of one call.

    That is where the call declared a task whose tool calls nobody executes. Both answers are judged here in the same
    way, by the verifier as it is now, and the verdicts are kept nowhere. A pair of which one is left without a verdict
    says nothing.
    """
    found: dict[str, tuple[bool, bool]] = {}
    for pair in pairs:
        task = pair.main.task
        if task is None or task.environment is not None or pair.answer.outcome is not ShadowOutcome.ANSWERED:
            continue
        arms = (pair.main.choices[0], _choice(pair))
        outcomes = [
            verdict.outcome
            for arm in arms
            for verdict in score_episodes([_episode(pair, arm)], verifiers, (), clock, max_calls=1).verdicts
            if verdict.outcome is not Outcome.ABSTAIN
        ]
        if len(outcomes) == len(arms):
            found[pair.main.id] = (outcomes[0] is Outcome.PASS, outcomes[1] is Outcome.PASS)
    return found


def _choice(pair: ShadowPair) -> Choice:
    return Choice(
        index=0,
        token_ids=(),
        logprobs=(),
        text=pair.answer.text,
        tool_calls=pair.answer.tool_calls,
        invalid_tool_call=pair.answer.invalid_tool_call,
        token_exact=False,
    )


def _episode(pair: ShadowPair, choice: Choice) -> Episode:
    """The call as an episode of its own, with one of the two answers."""
    main = replace(pair.main, episode_id=pair.main.id, choices=(choice,))
    return Episode(id=main.id, user_key=main.user_key, split=main.split, interactions=(main,))

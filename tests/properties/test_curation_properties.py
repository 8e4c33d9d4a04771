"""Curation over random traffic: nothing vanishes, nothing forbidden trains, caps hold, order is irrelevant.

A world is two windows of traffic; the second is curated with the batch of the first to replay from.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidegate.config.settings import CurationSettings
from tidegate.core.hashing import canonical_json
from tidegate.core.selection.demonstrations import per_prompt
from tidegate.core.selection.episodes import (
    deciding_scores,
    main_line,
    not_stale,
    of_train_split,
    successful,
    verdicts_by_episode,
    with_consent,
    with_verdict,
)
from tidegate.core.selection.limits import distinct, per_user, within_budget
from tidegate.core.selection.near_copies import near_distinct
from tidegate.core.selection.replay import Earlier
from tidegate.core.selection.sampling import balanced_draw, weighted_sample
from tidegate.core.selection.sequences import token_sequences
from tidegate.core.selection.sifting import Sifted
from tidegate.core.types import Choice, Episode, Feedback, Interaction, Outcome, Sampling, Split, Task, Verdict
from tidegate.curation import Batch, curate, episodes_shown

TOKENS = st.lists(st.integers(3, 5), min_size=0, max_size=2).map(tuple)
TEXTS = st.sampled_from(["x", "It is 7.", "It is 8."])
MESSAGES = st.sampled_from([({"role": "user", "content": text},) for text in "ab"])


Traffic: TypeAlias = tuple[list[Episode], list[Verdict], list[Feedback]]


@st.composite
def calls(draw: st.DrawFn, episode_id: str, user_key: str, split: Split, number: int) -> Interaction:
    tokens = draw(TOKENS)
    return Interaction(
        id=f"{episode_id}.{number}",
        episode_id=episode_id,
        user_key=user_key,
        split=draw(st.sampled_from([split, split, split, Split.DEV])),
        created_at=float(number),
        messages=draw(MESSAGES),
        tools=(),
        sampling=Sampling(top_p=draw(st.sampled_from([1.0, 1.0, 0.9]))),
        prompt_token_ids=(1, *draw(TOKENS)),
        choices=(Choice(index=0, token_ids=tokens, logprobs=tuple(-1.0 for _ in tokens), text=draw(TEXTS)),),
        release_id="r0",
        engine_replica="e0",
        latency_s=0.1,
        main_line=draw(st.sampled_from([True, True, True, False])),
        consent=draw(st.sampled_from([True, True, True, False])),
        task=None
        if draw(st.booleans())
        else Task(id="t", messages=draw(MESSAGES), verifier="v", reference=None, kind=draw(st.sampled_from("kl"))),
    )


@st.composite
def traffic(draw: st.DrawFn, window: str = "e") -> Traffic:
    episodes: list[Episode] = []
    verdicts: list[Verdict] = []
    feedback: list[Feedback] = []
    for number in range(draw(st.integers(0, 12))):
        identifier, user = f"{window}{number}", draw(st.sampled_from("uvw"))
        split = draw(st.sampled_from([Split.TRAIN, Split.TRAIN, Split.TRAIN, Split.DEV, Split.SEALED]))
        made = [draw(calls(identifier, user, split, n)) for n in range(draw(st.integers(1, 3)))]
        episodes.append(Episode(id=identifier, user_key=user, split=split, interactions=tuple(made)))
        verdicts.extend(
            Verdict(
                episode_id=identifier,
                verifier="v",
                version=version,
                outcome=draw(st.sampled_from([Outcome.PASS, Outcome.PASS, Outcome.FAIL, Outcome.ABSTAIN])),
                score=draw(st.sampled_from([1.0, 1.0, 0.7, 0.5, 0.0])),
                detail="",
                seconds=0.0,
                created_at=1.0,
            )
            for version in draw(st.sampled_from(["", "1", "1", "1", "12"]))
        )
        for n in range(draw(st.integers(0, 2))):
            value = draw(st.sampled_from([[{"role": "assistant", "content": "x"}], "x"]))
            feedback.append(
                Feedback(
                    id=f"{window}f{number}.{n}",
                    metric_name=draw(st.sampled_from(["demonstration", "thumbs"])),
                    value=value,
                    interaction_id=None,
                    episode_id=draw(st.sampled_from([identifier, "e99"])),
                    tags={},
                    created_at=1.0,
                )
            )
    return episodes, verdicts, feedback


SETTINGS = st.builds(
    CurationSettings,
    success_threshold=st.sampled_from([0.5, 1.0]),
    near_success_quantile=st.sampled_from([0.0, 0.55]),
    max_age_days=st.sampled_from([1.0, 1e-5]),
    max_examples=st.integers(4, 9),
    max_per_user=st.integers(1, 4),
    max_user_share=st.sampled_from([0.005, 0.4, 1.0]),
    min_fresh=st.integers(1, 4),
    max_per_prompt=st.integers(1, 3),
    max_per_cluster=st.integers(1, 3),
    replay_share=st.sampled_from([0.0, 0.15, 0.6]),
    demonstration_share=st.sampled_from([0.0, 0.1, 0.6]),
)
WORLD = st.tuples(traffic(), traffic("w"))
NOW = 2.0

each_world = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=40)


def earlier(seen: Traffic, batch: Batch) -> list[Earlier]:
    episodes = {episode.id: episode for episode in seen[0]} | episodes_shown(seen[0], seen[2])
    return [Earlier(example=e, episode=episodes.get(e.id) or episodes[e.id.partition(" ")[0]]) for e in batch.examples]


def curated(world: tuple[Traffic, Traffic], chosen: CurationSettings, seed: int, **options: Any) -> Batch:
    """The batch of the second window; ``replay`` False leaves the first out."""
    (_, before, _), (episodes, verdicts, feedback) = world
    first = curate(*world[0], settings=chosen, seed=seed, now=NOW, verifiers={}, **options)
    replay = earlier(world[0], first)
    return curate(
        episodes, [*before, *verdicts], feedback,
        settings=chosen, seed=seed, now=NOW, verifiers={}, replay=replay, **options,
    )  # fmt: skip


@each_world
@given(WORLD, SETTINGS, st.integers(0, 3), st.booleans())
def test_curation_nothing_vanishes(
    world: tuple[Traffic, Traffic], chosen: CurationSettings, seed: int, keep_failures: bool
) -> None:
    first = curate(*world[0], settings=chosen, seed=seed, now=NOW, verifiers={}, keep_failures=keep_failures)
    batch = curated(world, chosen, seed, keep_failures=keep_failures)
    episodes, _, feedback = world[1]
    items = batch.manifest["items"]
    by_source = {
        source: Counter(item["id"].partition(" ")[0] for item in items if item["source"] == source)
        for source in ("episode", "interaction", "feedback")
    }
    assert set(by_source["episode"]) == {episode.id for episode in episodes}
    assert by_source["feedback"] == Counter(item.id for item in feedback if item.metric_name == "demonstration")
    replayed = [item["id"] for item in items if item["source"] == "replay"]
    assert sorted(replayed) == sorted(example.id for example in first.examples)
    for episode in episodes:
        own = [item for item in items if item["source"] == "episode" and item["id"].partition(" ")[0] == episode.id]
        assert len(own) == 1 or all(" " in item["id"] for item in own)
    assert sum(batch.counts.values()) == len(items)
    assert batch.counts.get("kept", 0) == len(batch.examples)
    kept = [item for item in items if item["reason"] == "kept"]
    assert [(item["id"], item["weight"], item["cluster"], item["reward"]) for item in kept] == [
        (example.id, example.weight, example.cluster, example.reward) for example in batch.examples
    ]
    assert all(item["weight"] == 0.0 for item in items if item["reason"] != "kept")


@each_world
@given(WORLD, SETTINGS, st.integers(0, 3))
def test_curation_nothing_forbidden_trains_and_caps_hold(
    world: tuple[Traffic, Traffic], chosen: CurationSettings, seed: int
) -> None:
    batch = curated(world, chosen, seed)
    origin: dict[str, Episode] = {}
    for episodes, _, feedback in world:
        origin |= {episode.id: episode for episode in episodes}
        origin |= {item.id: origin[item.episode_id] for item in feedback if item.episode_id in origin}
    users: Counter[str] = Counter()
    for example in batch.examples:
        episode = origin[example.id.partition(" ")[0]]
        assert episode.split is Split.TRAIN
        assert all(call.split is Split.TRAIN and call.consent for call in episode.interactions)
        assert example.weight > 0
        assert len(example.logprobs) in (0, len(example.token_ids))
        users[episode.user_key] += 1
    assert all(count <= chosen.max_per_user for count in users.values())
    sources = Counter(example.source for example in batch.examples)
    assert sources["episode"] <= chosen.max_examples
    assert sources["feedback"] <= chosen.max_examples
    assert sources["replay"] <= chosen.replay_share * len(batch.examples) + 1e-6
    copies = Counter((e.token_ids, e.loss_mask) for e in batch.examples if e.token_ids)
    assert all(count <= chosen.max_per_prompt for count in copies.values())
    prompts = Counter(canonical_json(list(e.messages[:1])) for e in batch.examples if e.messages)
    assert all(count <= chosen.max_per_prompt for count in prompts.values())
    if batch.examples:
        assert math.fsum(e.weight for e in batch.examples) / len(batch.examples) == pytest.approx(1.0, abs=1e-6)


@each_world
@given(WORLD, SETTINGS, st.integers(0, 3))
def test_curation_trains_on_successes_and_what_comes_near(
    world: tuple[Traffic, Traffic], chosen: CurationSettings, seed: int
) -> None:
    batch = curated(world, chosen, seed)
    threshold = chosen.success_threshold
    for example in batch.examples:
        if example.reward is None:
            assert example.messages
        elif example.source == "replay":
            assert example.reward >= threshold
        else:
            assert example.reward > threshold / 2
    assert batch.fresh == sum(e.source == "episode" and (e.reward or 0.0) >= threshold for e in batch.examples)


@each_world
@given(WORLD, SETTINGS, st.integers(0, 3))
def test_curation_replay_never_replaces_anything(
    world: tuple[Traffic, Traffic], chosen: CurationSettings, seed: int
) -> None:
    alone = curate(*world[1], settings=chosen, seed=seed, now=NOW, verifiers={})
    batch = curated(world, chosen, seed)
    assert [e.id for e in batch.examples if e.source != "replay"] == [e.id for e in alone.examples]


@each_world
@given(WORLD, SETTINGS, st.integers(0, 3))
def test_curation_with_failures_keeps_every_judged_answer_that_the_caps_let_pass(
    world: tuple[Traffic, Traffic], chosen: CurationSettings, seed: int
) -> None:
    batch = curated(world, chosen, seed, keep_failures=True)
    assert set(batch.counts) & {"below_threshold", "duplicate", "near_duplicate"} == set()
    weights = {(example.kind, example.weight) for example in batch.examples if example.source == "episode"}
    if chosen.max_user_share == 1.0:
        assert len(weights) == len({kind for kind, _ in weights})


@each_world
@given(WORLD, SETTINGS, st.integers(0, 3), st.randoms(use_true_random=False), st.booleans())
def test_curation_the_order_of_the_input_is_irrelevant(
    world: Any, chosen: CurationSettings, seed: int, random: Any, keep_failures: bool
) -> None:
    first = curate(*world[0], settings=chosen, seed=seed, now=NOW, verifiers={}, keep_failures=keep_failures)
    inputs = (world[1][0], [*world[0][1], *world[1][1]], world[1][2], earlier(world[0], first))
    shuffled = tuple(random.sample(part, len(part)) for part in inputs)
    one, other = (
        curate(*given_, settings=chosen, seed=seed, now=NOW, verifiers={}, replay=replay, keep_failures=keep_failures)
        for *given_, replay in (inputs, shuffled)
    )
    assert canonical_json(one.manifest) == canonical_json(other.manifest)
    assert one == other


@each_world
@given(traffic(), st.integers(1, 3), st.integers(0, 3))
def test_selection_every_step_is_idempotent(seen: Any, quota: int, seed: int) -> None:
    episodes, verdicts, _ = seen
    judged = verdicts_by_episode(verdicts)
    steps: list[Callable[[Sequence[Any]], Sifted[Any]]] = [
        with_consent,
        of_train_split,
        main_line,
        lambda things: with_verdict(things, judged),
        lambda things: not_stale(things, now=86_401.0, max_age_days=1.0),
        lambda things: successful(things, deciding_scores(things, judged), threshold=1.0, above=0.4),
    ]
    limits: list[Callable[[Sequence[Any]], Sifted[Any]]] = [
        lambda things: distinct(things, copies=quota, seed=seed),
        lambda things: near_distinct(things, most=quota, seed=seed),
        lambda things: per_user(things, most=quota, seed=seed),
        lambda things: per_prompt(things, most=quota, seed=seed),
        lambda things: within_budget(things, budget=quota, seed=seed),
        lambda things: weighted_sample(things, budget=quota, seed=seed),
        lambda things: balanced_draw(things, size=quota, seed=seed),
    ]
    fresh = token_sequences(episodes).kept
    for things, step in [*((episodes, step) for step in steps), *((fresh, step) for step in limits)]:
        once = step(things)
        assert len(once.kept) + sum(gone.source != "interaction" for gone in once.dropped) == len(things)
        again = step(once.kept)
        assert again.kept == once.kept
        assert again.dropped == ()

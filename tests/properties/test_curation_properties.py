"""Curation over random traffic: nothing vanishes, nothing forbidden trains, caps hold, order is irrelevant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidegate.config.settings import CurationSettings
from tidegate.core.hashing import canonical_json
from tidegate.core.selection.demonstrations import per_prompt
from tidegate.core.selection.episodes import (
    main_line,
    of_train_split,
    successful,
    verdicts_by_episode,
    with_consent,
    with_verdict,
)
from tidegate.core.selection.limits import distinct, per_user, within_budget
from tidegate.core.selection.sequences import token_sequences
from tidegate.core.selection.sifting import Sifted
from tidegate.core.types import Choice, Episode, Feedback, Interaction, Outcome, Sampling, Split, Task, Verdict
from tidegate.curation import curate

TOKENS = st.lists(st.integers(3, 5), min_size=0, max_size=2).map(tuple)
MESSAGES = st.sampled_from([({"role": "user", "content": text},) for text in "ab"])


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
        sampling=Sampling(),
        prompt_token_ids=(1, *draw(TOKENS)),
        choices=(Choice(index=0, token_ids=tokens, logprobs=tuple(-1.0 for _ in tokens), text="x"),),
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
def traffic(draw: st.DrawFn) -> tuple[list[Episode], list[Verdict], list[Feedback]]:
    episodes: list[Episode] = []
    verdicts: list[Verdict] = []
    feedback: list[Feedback] = []
    for number in range(draw(st.integers(0, 12))):
        identifier, user = f"e{number}", draw(st.sampled_from("uvw"))
        split = draw(st.sampled_from([Split.TRAIN, Split.TRAIN, Split.TRAIN, Split.DEV, Split.SEALED]))
        made = [draw(calls(identifier, user, split, n)) for n in range(draw(st.integers(1, 3)))]
        episodes.append(Episode(id=identifier, user_key=user, split=split, interactions=tuple(made)))
        verdicts.extend(
            Verdict(
                episode_id=identifier,
                verifier="v",
                version=version,
                outcome=draw(st.sampled_from([Outcome.PASS, Outcome.PASS, Outcome.FAIL, Outcome.ABSTAIN])),
                score=draw(st.sampled_from([1.0, 1.0, 0.5])),
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
                    id=f"f{number}.{n}",
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
    max_examples=st.integers(1, 6),
    max_per_user=st.integers(1, 4),
    max_per_prompt=st.integers(1, 3),
)


def curated(traffic_: tuple[list[Episode], list[Verdict], list[Feedback]], chosen: CurationSettings, seed: int) -> Any:
    return curate(*traffic_, settings=chosen, seed=seed, verifiers={})


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=40)
@given(traffic(), SETTINGS, st.integers(0, 3))
def test_curation_nothing_vanishes(seen: Any, chosen: CurationSettings, seed: int) -> None:
    episodes, _, feedback = seen
    batch = curated(seen, chosen, seed)
    items = batch.manifest["items"]
    by_source = {
        source: Counter(item["id"].partition("/")[0] for item in items if item["source"] == source)
        for source in ("episode", "interaction", "feedback")
    }
    assert set(by_source["episode"]) == {episode.id for episode in episodes}
    assert by_source["feedback"] == Counter(item.id for item in feedback if item.metric_name == "demonstration")
    for episode in episodes:
        own = [item for item in items if item["source"] == "episode" and item["id"].partition("/")[0] == episode.id]
        assert len(own) == 1 or all("/" in item["id"] for item in own)
    assert sum(batch.counts.values()) == len(items)
    assert batch.counts.get("kept", 0) == len(batch.examples)
    assert [item["id"] for item in items if item["reason"] == "kept"] == [example.id for example in batch.examples]


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=40)
@given(traffic(), SETTINGS, st.integers(0, 3))
def test_curation_nothing_forbidden_trains_and_caps_hold(seen: Any, chosen: CurationSettings, seed: int) -> None:
    episodes, _, feedback = seen
    batch = curated(seen, chosen, seed)
    origin = {episode.id: episode for episode in episodes}
    origin |= {item.id: origin[item.episode_id] for item in feedback if item.episode_id in origin}
    users: Counter[str] = Counter()
    for example in batch.examples:
        episode = origin[example.id.partition("/")[0]]
        assert episode.split is Split.TRAIN
        assert all(call.split is Split.TRAIN and call.consent for call in episode.interactions)
        users[episode.user_key] += 1
    assert all(count <= chosen.max_per_user for count in users.values())
    assert batch.fresh <= chosen.max_examples
    copies = Counter((e.token_ids, e.loss_mask) for e in batch.examples if e.token_ids)
    assert all(count <= chosen.max_per_prompt for count in copies.values())
    prompts = Counter(canonical_json(list(e.messages[:1])) for e in batch.examples if e.messages)
    assert all(count <= chosen.max_per_prompt for count in prompts.values())


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=40)
@given(traffic(), SETTINGS, st.integers(0, 3), st.randoms(use_true_random=False))
def test_curation_the_order_of_the_input_is_irrelevant(
    seen: Any, chosen: CurationSettings, seed: int, random: Any
) -> None:
    shuffled = tuple(random.sample(part, len(part)) for part in seen)
    first, second = curated(seen, chosen, seed), curated(shuffled, chosen, seed)  # type: ignore[arg-type]
    assert canonical_json(first.manifest) == canonical_json(second.manifest)
    assert first == second


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=40)
@given(traffic(), st.integers(1, 3), st.integers(0, 3))
def test_selection_every_step_is_idempotent(seen: Any, quota: int, seed: int) -> None:
    episodes, verdicts, _ = seen
    judged = verdicts_by_episode(verdicts)
    steps: list[Callable[[Sequence[Any]], Sifted[Any]]] = [
        with_consent,
        of_train_split,
        main_line,
        lambda things: with_verdict(things, judged),
        lambda things: successful(things, judged, threshold=1.0),
    ]
    limits: list[Callable[[Sequence[Any]], Sifted[Any]]] = [
        lambda things: distinct(things, copies=quota, seed=seed),
        lambda things: per_user(things, most=quota, seed=seed),
        lambda things: per_prompt(things, most=quota, seed=seed),
        lambda things: within_budget(things, budget=quota, seed=seed),
    ]
    fresh = token_sequences(episodes).kept
    for things, step in [*((episodes, step) for step in steps), *((fresh, step) for step in limits)]:
        once = step(things)
        again = step(once.kept)
        assert again.kept == once.kept
        assert again.dropped == ()

"""Routing: pins, leases, and a swap that moves only new episodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.errors import NotFoundError
from tidegate.core.gate.live_assignment import Assignment, LiveArm
from tidegate.release.router import Division, RoutedRelease, Router


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def release(name: str) -> RoutedRelease:
    return RoutedRelease(release_id=name, adapter=f"adapter-{name}")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def router(clock: Clock) -> Router:
    router = Router(model_name="model", episode_ttl_s=10.0, clock=clock)
    router.add(release("r1"), created_at=1.0)
    router.add(release("r2"), created_at=2.0)
    router.point_champion_at("r1")
    return router


def resolved(router: Router, model: str = "champion", episode: str = "e") -> str:
    return router.resolve(model, episode_id=episode, user_key="u").release_id


def test_all_names_of_the_champion_mean_the_same(router: Router) -> None:
    assert resolved(router, "champion", "a") == resolved(router, "model", "b") == resolved(router, "r1", "c") == "r1"
    assert resolved(router, "r2", "d") == "r2"


def test_unknown_model_names_what_is_served(router: Router) -> None:
    with pytest.raises(NotFoundError, match=r"'gpt-4'.*'model'.*'champion'.*'r1'.*'r2'"):
        resolved(router, "gpt-4")


def test_swap_moves_new_episodes_and_leaves_begun_ones(router: Router) -> None:
    assert resolved(router, episode="old") == "r1"
    router.point_champion_at("r2")
    assert resolved(router, episode="old") == "r1"
    assert resolved(router, episode="new") == "r2"


def test_pin_ends_after_its_time_to_live(router: Router, clock: Clock) -> None:
    resolved(router, episode="old")
    router.point_champion_at("r2")
    clock.now = 9.0
    assert resolved(router, episode="old") == "r1"  # and the time starts anew
    clock.now = 18.0
    assert resolved(router, episode="old") == "r1"
    clock.now = 28.5
    assert resolved(router, episode="old") == "r2"


def test_release_in_use_is_not_removed(router: Router, clock: Clock) -> None:
    router.point_champion_at("r2")
    with router.lease("r1"):
        assert not router.remove("r1")
        assert "r1" in {release.release_id for release in router.loaded()}
        with pytest.raises(NotFoundError):  # but nobody new finds it
            resolved(router, "r1", "explicit")
        assert "r1" not in dict(router.models())
    assert router.remove("r1")
    with pytest.raises(NotFoundError):
        resolved(router, "r1")


def test_pinned_release_is_not_removed_until_the_pin_expires(router: Router, clock: Clock) -> None:
    resolved(router, episode="old")
    router.point_champion_at("r2")
    assert not router.remove("r1")
    clock.now = 10.5
    assert router.remove("r1")


def test_champion_is_never_removed_and_pointer_needs_a_loaded_release(router: Router) -> None:
    assert not router.remove("r1")
    with pytest.raises(NotFoundError, match="r9"):
        router.point_champion_at("r9")
    assert router.champion == "r1"


def test_further_names_mean_the_champion_and_are_listed_once() -> None:
    router = Router(model_name="model", other_names=("org/Model", "model"), episode_ttl_s=10.0, clock=Clock())
    router.add(release("r1"), created_at=3.0)
    router.point_champion_at("r1")
    assert router.resolve("org/Model", episode_id="e", user_key="u").release_id == "r1"
    assert router.models() == [("model", 3.0), ("champion", 3.0), ("org/Model", 3.0), ("r1", 3.0)]


def test_before_the_first_release_requests_are_told_so() -> None:
    router = Router(model_name="model", episode_ttl_s=10.0, clock=Clock())
    with pytest.raises(NotFoundError, match="still starting"):
        resolved(router)


def test_expired_pins_are_dropped_without_any_swap(router: Router, clock: Clock) -> None:
    for number in range(200):
        resolved(router, episode=f"early-{number}")
    clock.now = 11.0
    for number in range(56):
        resolved(router, episode=f"late-{number}")
    assert router.pinned_episodes == 56  # the last of them swept, before it was pinned itself


@given(st.lists(st.tuples(st.sampled_from(["ask", "swap", "tick"]), st.integers(0, 5)), max_size=60))
def test_an_episode_never_changes_release_while_it_is_alive(steps: list[tuple[str, int]]) -> None:
    clock = Clock()
    router = Router(model_name="model", episode_ttl_s=10.0, clock=clock)
    names = [f"r{i}" for i in range(6)]
    for name in names:
        router.add(release(name), created_at=0.0)
    router.point_champion_at("r0")
    seen: dict[str, tuple[str, float]] = {}
    for what, number in steps:
        if what == "swap":
            router.point_champion_at(names[number])
        elif what == "tick":
            clock.now += number
        else:
            episode = f"e{number}"
            answer = resolved(router, episode=episode)
            if episode in seen and clock.now - seen[episode][1] <= 10.0:
                assert answer == seen[episode][0]
            else:
                assert answer == router.champion
            seen[episode] = (answer, clock.now)


def _divided(share: float = 0.3, release_id: str = "r2") -> Division:
    assignment = Assignment(draw="canary-1", share=share, low=LiveArm.SUBJECT)
    return Division(assignment=assignment, release_id=release_id)


def test_divided_users_begin_on_the_other_release_and_stay_with_it(router: Router) -> None:
    division = _divided()
    router.divide(division)
    assert router.division is division
    for number in range(200):
        user = f"user-{number}"
        wanted = "r2" if division.assignment.is_low(user) else "r1"
        for episode in ("first", "second"):
            found = router.resolve("champion", episode_id=f"{user}-{episode}", user_key=user)
            assert found.release_id == wanted
        assert router.resolve("r1", episode_id="by name", user_key=user).release_id == "r1"


def test_the_end_of_a_division_moves_new_episodes_at_once_and_leaves_begun_ones(router: Router) -> None:
    router.divide(_divided(share=0.999999))
    assert resolved(router, episode="old") == "r2"
    router.divide(None)
    assert resolved(router, episode="new") == "r1"
    assert resolved(router, episode="old") == "r2"


def test_a_release_that_users_begin_on_is_not_removed(router: Router) -> None:
    router.divide(_divided())
    assert not router.remove("r2")
    router.divide(None)
    assert router.remove("r2")


def test_nobody_is_sent_to_a_release_that_is_not_loaded(router: Router) -> None:
    with pytest.raises(NotFoundError, match="'r9' is not loaded"):
        router.divide(_divided(release_id="r9"))
    assert router.division is None

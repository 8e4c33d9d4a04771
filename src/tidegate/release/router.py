"""Which release answers a request, and which releases are still needed.

The table lives in memory on the serving loop; the durable truth is the release store, from which
:class:`tidegate.release.publisher.Publisher` fills it. A swap is one assignment here: requests that hold a
lease, and episodes that began on a release, stay on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from tidegate.core.errors import NotFoundError
from tidegate.core.gate.live_assignment import Assignment
from tidegate.release.shadow_route import ShadowRoute

CHAMPION = "champion"
PREVIOUS = "previous"
ANCHOR = "anchor"
CANARY = "canary"
"""Names the canary's release; the champion's while there is none."""

_SWEEP_EVERY = 256
"""Requests between two sweeps of expired pins: without swaps nothing else would drop them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRelease:
    """The release that a request is answered by; ``adapter`` is its name in the engine, None the base."""

    release_id: str
    adapter: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Users of the low arm of ``assignment`` begin their episodes on ``release_id`` instead of the champion."""

    assignment: Assignment
    release_id: str


@dataclass(slots=True)
class _Pin:
    release_id: str
    last_used: float


class Router:
    """Routing table of one gateway process.

    Args:
        model_name: served name that means the champion, beside ``champion`` itself.
        episode_ttl_s: an episode keeps its release for this long after its last request.
        clock: monotonic seconds.
        other_names: further names that mean the champion.
    """

    def __init__(
        self, *, model_name: str, episode_ttl_s: float, clock: Callable[[], float], other_names: Collection[str] = ()
    ) -> None:
        self._champion_names = tuple(dict.fromkeys((model_name, CHAMPION, *other_names)))
        self._ttl_s = episode_ttl_s
        self._clock = clock
        self._loaded: dict[str, tuple[RoutedRelease, float]] = {}
        self._nameless: set[str] = set()
        self._champion: str | None = None
        self._division: Division | None = None
        self._shadow: ShadowRoute | None = None
        self._ended_shadows: list[ShadowRoute] = []
        self._leases: Counter[str] = Counter()
        self._pins: dict[str, _Pin] = {}
        self._resolved = 0

    @property
    def champion(self) -> str | None:
        """Release id that new episodes begin on."""
        return self._champion

    def add(self, release: RoutedRelease, *, created_at: float, named: bool = True) -> None:
        """Make a loaded release addressable; unless ``named`` only through the division, never by its id."""
        self._loaded[release.release_id] = (release, created_at)
        (self._nameless.discard if named else self._nameless.add)(release.release_id)

    def point_champion_at(self, release_id: str) -> None:
        """The swap: every request resolved from now on that is not pinned goes to ``release_id``."""
        self._require_loaded(release_id)
        self._nameless.discard(release_id)
        self._champion = release_id

    @property
    def division(self) -> Division | None:
        """Who begins elsewhere than on the champion, if anybody."""
        return self._division

    def divide(self, division: Division | None) -> None:
        """Send a share of the users to another release from now on; None sends everybody to the champion.

        Raises:
            NotFoundError: the release is not loaded.
        """
        if division is not None:
            self._require_loaded(division.release_id)
        self._division = division

    @property
    def shadow(self) -> ShadowRoute | None:
        """Where copies of calls go, if anywhere; never where a call itself does."""
        return self._shadow

    def point_shadow_at(self, route: ShadowRoute) -> None:
        """Copy calls there from now on."""
        self._shadow = route

    def end_shadow(self) -> ShadowRoute | None:
        """Copy no call any more; returns where they went, whose calls break off now."""
        route, self._shadow = self._shadow, None
        if route is not None:
            route.ended.set()
            self._ended_shadows.append(route)
        return route

    def adapters(self) -> set[str | None]:
        """Names in the engine of everything that answers somebody, or the shadow's calls."""
        self._ended_shadows = [route for route in self._ended_shadows if route.calls]
        shadows = self._ended_shadows if self._shadow is None else [*self._ended_shadows, self._shadow]
        return {release.adapter for release in self.loaded()} | {route.adapter for route in shadows}

    def remove(self, release_id: str) -> bool:
        """Forget a release unless new episodes begin on it; True when it is gone.

        One that is still in use answers the episodes that began on it, and nobody else finds it by its id.
        """
        divided = self._division is not None and self._division.release_id == release_id
        if release_id == self._champion or divided:
            return False
        if self.in_use(release_id):
            self._nameless.add(release_id)
            return False
        self._loaded.pop(release_id, None)
        self._nameless.discard(release_id)
        return True

    def in_use(self, release_id: str) -> bool:
        """Whether a request holds a lease on the release or a live episode is pinned to it."""
        self._drop_expired_pins()
        return self._leases[release_id] > 0 or any(pin.release_id == release_id for pin in self._pins.values())

    def loaded(self) -> tuple[RoutedRelease, ...]:
        """All releases that answer somebody."""
        return tuple(release for release, _ in self._loaded.values())

    def models(self) -> list[tuple[str, float]]:
        """Names for ``/v1/models`` with their creation times."""
        created = {release.release_id: at for release, at in self._loaded.values()}
        champion_at = created.get(self._champion or "", 0.0)
        named = sorted((name, at) for name, at in created.items() if name not in self._nameless)
        return [*((name, champion_at) for name in self._champion_names), *named]

    def resolve(self, model: str, *, episode_id: str, user_key: str) -> RoutedRelease:
        """Route one request.

        Args:
            model: the model name, ``champion``, or a release id.
            episode_id: an episode that began on a release stays on it while that is loaded.
            user_key: decides, while users are divided, on which release a new episode begins.

        Raises:
            NotFoundError: no such model, or no release is served yet.
        """
        self._resolved += 1
        if self._resolved % _SWEEP_EVERY == 0:
            self._drop_expired_pins()
        if model in self._loaded and model not in self._nameless:
            return self._loaded[model][0]
        if model not in self._champion_names:
            names = ", ".join(repr(name) for name, _ in self.models())
            raise NotFoundError(f"model {model!r} is not served here; choose one of {names}")
        if self._champion is None:
            raise NotFoundError("no release is served yet; the engine is still starting")
        now = self._clock()
        pin = self._pins.get(episode_id)
        if pin is None or pin.release_id not in self._loaded or now - pin.last_used > self._ttl_s:
            pin = self._pins[episode_id] = _Pin(self._begins_on(self._champion, user_key), now)
        pin.last_used = now
        return self._loaded[pin.release_id][0]

    @property
    def pinned_episodes(self) -> int:
        """How many episodes the router remembers."""
        return len(self._pins)

    def end_episode(self, episode_id: str) -> None:
        """An episode that answered without a tool call holds its release no longer than its next request."""
        self._pins.pop(episode_id, None)

    @contextmanager
    def lease(self, release_id: str) -> Generator[None]:
        """Keep a release loaded while a request runs."""
        self._leases[release_id] += 1
        try:
            yield
        finally:
            self._leases[release_id] -= 1

    def _begins_on(self, champion: str, user_key: str) -> str:
        division = self._division
        if division is not None and division.assignment.is_low(user_key):
            return division.release_id
        return champion

    def _require_loaded(self, release_id: str) -> None:
        if release_id not in self._loaded:
            raise NotFoundError(f"release {release_id!r} is not loaded; loaded: {sorted(self._loaded)}")

    def _drop_expired_pins(self) -> None:
        now = self._clock()
        expired = [episode for episode, pin in self._pins.items() if now - pin.last_used > self._ttl_s]
        for episode in expired:
            del self._pins[episode]

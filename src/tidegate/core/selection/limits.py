"""How much of what may train does train: copies of one answer, one user's share, the budget of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tidegate.core.hashing import content_hash
from tidegate.core.selection.sequences import Fresh, prompt_key
from tidegate.core.selection.sifting import Dropped, Sifted, limit, no_preference


def distinct(
    fresh: Sequence[Fresh],
    *,
    copies: int,
    seed: int,
    used: Mapping[str, int] | None = None,
    prefer: Callable[[Fresh], bool] = no_preference,
) -> Sifted[Fresh]:
    """Keep at most ``copies`` (>= 1) examples of equal :func:`copy_key`, those that ``used`` counts included."""
    return limit(
        fresh,
        identify=_identify,
        group=copy_key,
        quota=copies,
        seed=seed,
        drop=lambda item: dropped_example(item, "duplicate"),
        used=used,
        prefer=prefer,
    )


def copy_key(item: Fresh) -> str:
    """Equal for the very same prompt and completion tokens; of demonstrations, for the same prompt."""
    example = item.example
    if not example.token_ids:
        return prompt_key(example)
    return content_hash([list(example.token_ids), list(example.loss_mask)])


def per_user(
    fresh: Sequence[Fresh],
    *,
    most: int,
    seed: int,
    used: Mapping[str, int] | None = None,
    prefer: Callable[[Fresh], bool] = no_preference,
) -> Sifted[Fresh]:
    """Keep at most ``most`` examples of one user, those that ``used`` counts included."""
    return limit(
        fresh,
        identify=_identify,
        group=lambda item: item.user_key,
        quota=most,
        seed=seed,
        drop=lambda item: dropped_example(item, "user_cap"),
        used=used,
        prefer=prefer,
    )


def within_budget(fresh: Sequence[Fresh], *, budget: int, seed: int) -> Sifted[Fresh]:
    """Keep all up to ``budget`` examples, above it a sample of that size."""
    return limit(
        fresh,
        identify=_identify,
        group=lambda _: None,
        quota=budget,
        seed=seed,
        drop=lambda item: dropped_example(item, "over_budget"),
    )


def dropped_example(item: Fresh, reason: str) -> Dropped:
    """The record of an example that does not train."""
    example = item.example
    return Dropped(
        id=example.id,
        reason=reason,
        kind=example.kind,
        source=example.source,
        reward=example.reward,
        cluster=example.cluster,
    )


def _identify(item: Fresh) -> str:
    return item.example.id

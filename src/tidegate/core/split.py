"""Where a user's traffic goes: a keyed hash decides once and for all, before any filter sees the data.

The key is a secret of the installation. Without it nobody can pick a user id that lands in a wanted split,
and stored user keys do not lead back to user ids.
"""

from __future__ import annotations

import hashlib
import hmac
import math

from tidegate.core.errors import ConfigError
from tidegate.core.types import Split

MIN_KEY_BYTES = 16  # 128 bits: below that a user id could be found by trying keys
_USER_KEY_DIGITS = 32


def split_of(key: bytes, unit: str, shares: tuple[float, float, float]) -> Split:
    """The split of one unit: HMAC-SHA256 mapped uniformly to [0, 1) and cut at the shares.

    Args:
        key: secret of the installation, at least 16 bytes.
        unit: what is assigned as a whole, a user key or, without users, an episode id.
        shares: of train, dev and sealed; each in [0, 1], together 1.

    Raises:
        ConfigError: the key is too short or the shares do not sum to 1.
    """
    if any(not 0.0 <= share <= 1.0 for share in shares) or not math.isclose(sum(shares), 1.0, abs_tol=1e-9):
        raise ConfigError(f"split shares {shares!r} are not usable; three numbers in [0, 1] that sum to 1 are accepted")
    position = int.from_bytes(_digest(key, "split", unit)[:8], "big") / 2.0**64
    served = [(split, share) for split, share in zip(Split, shares, strict=True) if share > 0.0]
    edge = 0.0
    for split, share in served[:-1]:
        edge += share
        if position < edge:
            return split
    return served[-1][0]  # the last one takes what rounding leaves below 1


def user_key(key: bytes, user_id: str) -> str:
    """The name under which a user is stored: 32 hex digits of HMAC-SHA256, never the id itself.

    Raises:
        ConfigError: the key is too short.
    """
    return _digest(key, "user", user_id).hex()[:_USER_KEY_DIGITS]


def _digest(key: bytes, purpose: str, text: str) -> bytes:
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(f"the split key has {len(key)} bytes; at least {MIN_KEY_BYTES} are needed")
    # surrogatepass: a client may send any JSON text as its user id, lone surrogates included
    message = f"{purpose}:{text}".encode("utf-8", "surrogatepass")
    return hmac.new(key, message, hashlib.sha256).digest()

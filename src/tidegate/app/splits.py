"""Who belongs to which split, for good: the key and the shares of a data directory never change.

A user that moved from sealed to train would teach the answers that it was kept to test with.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from tidegate.app.layout import DataDirectory
from tidegate.artifacts import read_json, write_atomically
from tidegate.config import Settings
from tidegate.core.errors import ConfigError
from tidegate.core.split import split_of, user_key
from tidegate.core.types import Split

_PROBE = "the user that fingerprints a split key"


def user_splitter(settings: Settings, directory: DataDirectory) -> Callable[[str], tuple[str, Split]]:
    """User id to (keyed hash, split), pinned to what the directory was made with.

    Raises:
        ConfigError: the key is lost or another one, or the shares were changed after traffic was recorded.
    """
    pinned = directory.root / "split.json"
    if pinned.exists() and not (directory.root / "keys" / "split.key").exists():
        raise ConfigError(
            f"data directory {str(directory.root)!r} has lost keys/split.key, so that nobody's split is known any "
            "more; restore the file from a backup, or start with a new data directory"
        )
    key = directory.split_key()
    shares = (settings.split.train, settings.split.dev, settings.split.sealed)
    wanted = {"fingerprint": user_key(key, _PROBE), "train": shares[0], "dev": shares[1], "sealed": shares[2]}
    if not pinned.exists():
        write_atomically(pinned, json.dumps(wanted).encode())
    found = read_json(pinned, "pinned split")
    if found.get("fingerprint") != wanted["fingerprint"]:
        raise ConfigError(
            f"keys/split.key in {str(directory.root)!r} is not the key that its traffic was split with; restore it"
        )
    if found != wanted:
        shown = ", ".join(f"{name} = {found.get(name)!r}" for name in ("train", "dev", "sealed"))
        raise ConfigError(
            f"settings [split] are {shares!r}, but the users of {str(directory.root)!r} were split with {shown}; users "
            "never move between splits: put the shares back, or start with a new data directory"
        )

    def split(user_id: str) -> tuple[str, Split]:
        return user_key(key, user_id), split_of(key, user_id, shares)

    return split

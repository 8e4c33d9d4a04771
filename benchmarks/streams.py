"""Users that stream from a server, and what their times say."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.harness import REPOSITORY

CLIENT = REPOSITORY / "benchmarks" / "peers" / "stream_client.py"
_MOST_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """All calls of one load; times in seconds."""

    calls: Sequence[Mapping[str, Any]]
    seconds: float

    @property
    def failed(self) -> list[str]:
        """Why calls failed."""
        return [str(call["error"]) for call in self.calls if "error" in call]

    @property
    def good(self) -> list[Mapping[str, Any]]:
        """The calls that ended as they should."""
        return [call for call in self.calls if "error" not in call]

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the time of the whole load."""
        return sum(int(call["tokens"]) for call in self.good) / self.seconds

    def first_tokens_s(self) -> list[float]:
        """Time to the first text of each call."""
        return [call["stamps"][0] - call["begun"] for call in self.good if call["stamps"]]

    def gaps_s(self) -> list[float]:
        """Times between two pieces of text of the same answer."""
        return [b - a for call in self.good for a, b in zip(call["stamps"], call["stamps"][1:], strict=False)]


async def streamed(url: str, model: str, *, streams: int, limit: str, tokens: int) -> Streamed:
    """Put load on a server from a process of its own; ``limit`` is a number of seconds, or ``x`` and one of calls.

    Raises:
        RuntimeError: the client failed, or every call did.
    """
    command = (sys.executable, str(CLIENT), url, model, str(streams), limit, str(tokens))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"the client ended with {process.returncode}; its message stands on stderr")
    found = json.loads(out)
    result = Streamed(calls=found["calls"], seconds=found["ended"] - found["started"])
    if result.calls and not result.good:
        raise RuntimeError(f"every call to {url} failed: {result.failed[:_MOST_SHOWN]}")
    return result


def percentile(values: Sequence[float], share: float) -> float:
    """A percentile of at least one value, ``share`` in [0, 100]."""
    return float(np.percentile(np.asarray(values), share))

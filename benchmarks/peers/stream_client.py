"""Users that stream chat completions one after another, in a process of its own; prints one JSON line.

``stream_client.py URL MODEL STREAMS SECONDS|xCALLS MAX_TOKENS``: each of the streams asks until so many seconds have
passed, or so many calls over all streams. The times of every chunk are those at which the client has read it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from typing import Any

import aiohttp

_WORDS = ("lighthouse", "garden", "winter", "harbour", "teacher", "violin", "mountain", "letter", "river", "kitchen")
_LONGEST_S = 120.0


def prompt(number: int) -> str:
    """About 40 tokens with the template, each different from its beginning on."""
    words = random.Random(number).sample(_WORDS, 4)  # noqa: S311 - variety, no secret
    return f"Story {number}: write a long tale about a {words[0]}, a {words[1]}, a {words[2]} and a {words[3]}."


async def _one(session: aiohttp.ClientSession, url: str, model: str, number: int, tokens: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": prompt(number)}],
        "max_tokens": tokens,
        "temperature": 1.0,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begun = time.monotonic()
    stamps: list[float] = []
    used = 0
    release = ended = None
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                return {"begun": begun, "error": f"{response.status} {(await response.text())[:200]}"}
            release = response.headers.get("x-tidegate-release")
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    ended = time.monotonic()
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    return {"begun": begun, "error": str(event["error"])[:200]}
                if any(choice.get("delta", {}).get("content") for choice in event.get("choices", [])):
                    stamps.append(time.monotonic())
                used = (event.get("usage") or {}).get("completion_tokens", used)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return {"begun": begun, "error": f"{type(error).__name__}: {error}"}
    if ended is None:
        return {"begun": begun, "error": "the stream broke off"}
    return {"begun": begun, "ended": ended, "stamps": stamps, "tokens": used, "release": release}


async def _main(url: str, model: str, streams: int, limit: str, tokens: int) -> None:
    numbers = itertools.count()
    calls: list[dict[str, Any]] = []
    most = int(limit[1:]) if limit.startswith("x") else None
    until = time.monotonic() + (_LONGEST_S if most is not None else float(limit))

    async def user(session: aiohttp.ClientSession) -> None:
        while time.monotonic() < until:
            number = next(numbers)
            if most is not None and number >= most:
                return
            calls.append(await _one(session, url, model, number, tokens))

    timeout = aiohttp.ClientTimeout(total=_LONGEST_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        started = time.monotonic()
        await asyncio.gather(*(user(session) for _ in range(streams)))
        print(json.dumps({"started": started, "ended": time.monotonic(), "calls": calls}))


if __name__ == "__main__":
    _url, _model, _streams, _limit, _tokens = sys.argv[1:6]
    asyncio.run(_main(_url, _model, int(_streams), _limit, int(_tokens)))

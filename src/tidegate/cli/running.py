"""Running a command's coroutine so that Ctrl-C ends it, and a second Ctrl-C ends it at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_until_interrupted(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on an event loop of its own.

    The first SIGINT cancels it, so that it tidies up. The second one kills the process: an interrupt that asyncio
    raises in the middle of a callback can lose a wake-up, after which the loop waits for ever. Whatever a command
    leaves behind then is what ``kill -9`` leaves, and the next run goes on from that.

    Raises:
        KeyboardInterrupt: it was cancelled by SIGINT.
    """
    interrupted = False

    async def main() -> T:
        task = asyncio.ensure_future(work)

        def interrupt() -> None:
            nonlocal interrupted
            interrupted = True
            asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupt)
        return await task

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        if interrupted:
            raise KeyboardInterrupt from None
        raise

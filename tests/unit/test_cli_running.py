"""Ctrl-C: the first one lets a command tidy up, the second one ends it whatever it does."""

from __future__ import annotations

import signal
import subprocess
import sys

SCRIPT = """
import asyncio, sys
from tidegate.cli.running import run_until_interrupted

async def work():
    print("ready", flush=True)
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            print("cancelled", flush=True)
            if sys.argv[1] == "tidy":
                raise

try:
    run_until_interrupted(work())
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(130)
"""


def started(manner: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, manner], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_the_first_interrupt_cancels_and_is_told() -> None:
    with started("tidy") as process:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert output == "cancelled\ninterrupted\n"
    assert process.returncode == 130


def test_the_second_interrupt_ends_a_command_that_does_not_end_itself() -> None:
    with started("stubborn") as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "cancelled\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == -signal.SIGINT


def test_a_result_comes_through() -> None:
    script = (
        "import asyncio; from tidegate.cli.running import run_until_interrupted as run; print(run(asyncio.sleep(0, 7)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "7\n"

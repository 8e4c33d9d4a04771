"""What several folders share: how properties are searched, and fixtures."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator

import pytest
from hypothesis import settings

from gateway_world import World, running_world

# Examples are not timed: on a busy machine a slow one says nothing about the code. In CI the search is the same
# each time, so that a red run can be repeated.
settings.register_profile("tidegate", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("tidegate")


@pytest.fixture
async def world() -> AsyncGenerator[World]:
    """A live gateway over a scripted engine."""
    async with running_world() as running:
        yield running

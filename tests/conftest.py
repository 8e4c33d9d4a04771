"""What several folders share: how properties are searched, and fixtures."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Generator

import pytest
from hypothesis import settings

from gateway_world import World, running_world
from postgres_world import Server, running_postgres

# Examples are not timed: on a busy machine a slow one says nothing about the code. In CI the search is the same
# each time, so that a red run can be repeated.
settings.register_profile("tidegate", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("tidegate")


@pytest.fixture
async def world() -> AsyncGenerator[World]:
    """A live gateway over a scripted engine."""
    async with running_world() as running:
        yield running


@pytest.fixture(scope="session")
def postgres() -> Generator[Server]:
    """A PostgreSQL server of this run's own; a test that stops it starts it again."""
    with running_postgres() as server:
        yield server

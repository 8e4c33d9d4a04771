"""What every test shares: how properties are searched."""

from __future__ import annotations

import os

from hypothesis import settings

# Examples are not timed: on a busy machine a slow one says nothing about the code. In CI the search is the same
# each time, so that a red run can be repeated.
settings.register_profile("tidegate", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("tidegate")

"""Ways around the gate, each of which must not serve. Where a whole data directory is needed the test lies elsewhere:

- adapter bytes replaced after certification, a certificate of another adapter, a store row set by SQL:
  ``tests/e2e/test_loop_commands.py``;
- an edited policy, an edited audit line: ``tests/e2e/test_gate_commands.py``;
- a clock that is set back, a certificate that rests on no promotion: ``tests/unit/test_gate_controls.py``;
- death between decision and publication: ``tests/faults/test_cycle_kill.py``;
- a judge that times out: ``tests/unit/test_gate_runner.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from openai import NotFoundError

from gateway_world import BASE_RELEASE, MODEL, running_world
from tidegate.core.types import AdapterRef


async def test_an_adapter_that_was_loaded_into_the_engine_by_hand_answers_nobody(tmp_path: Path) -> None:
    async with running_world() as world, world.client() as client:
        await world.engine.load(AdapterRef(name="smuggled", path=tmp_path, sha256="e" * 64))
        for name in ("smuggled", "e" * 64):
            with pytest.raises(NotFoundError, match="is not served here"):
                await client.chat.completions.create(model=name, messages=[{"role": "user", "content": "hi"}])
        for name in (MODEL, "champion"):
            await client.chat.completions.create(model=name, messages=[{"role": "user", "content": "hi"}])
        assert "smuggled" not in [model.id async for model in client.models.list()]
        assert {request.adapter for request in world.engine.requests} == {None}
        assert {record.release_id for record in world.recorder.interactions.values()} == {BASE_RELEASE}

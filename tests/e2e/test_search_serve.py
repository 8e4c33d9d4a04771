"""A search through a whole server: the composition root's wiring, the real engine, the real store."""

from __future__ import annotations

from pathlib import Path

import aiohttp
from openai import AsyncOpenAI

from engine_fixtures import write_tiny_model
from tidegate.app.layout import DataDirectory
from tidegate.app.serving import running
from tidegate.app.stores import open_stores
from tidegate.config import Settings
from tidegate.config.settings import ModelSettings, ServerSettings, SplitSettings
from tidegate.core.searched import answer_of, searched_groups
from tidegate.core.types import Split

TASK = {"tidegate_verifier": "exact_text", "tidegate_reference": "nobody says this"}


async def test_a_search_is_served_recorded_and_read_back(tmp_path: Path) -> None:
    settings = Settings(
        data_dir=tmp_path / "data",
        server=ServerSettings(port=0, admin_port=0),
        model=ModelSettings(path=str(write_tiny_model(tmp_path / "model")), threads=1, dtype="float32"),
        split=SplitSettings(train=1.0, dev=0.0, sealed=0.0),
    )
    async with (
        running(settings, say=lambda _: None) as address,
        AsyncOpenAI(base_url=f"{address.url}/v1", api_key="k", max_retries=0) as client,
    ):
        raw = await client.chat.completions.with_raw_response.create(
            model="champion",
            messages=[{"role": "user", "content": "2+2?"}],
            max_tokens=8,
            seed=5,
            metadata=TASK,
            extra_headers={"x-tidegate-search": "best-of-3"},
        )
        answer = raw.parse()
        stream = await client.chat.completions.create(
            model="champion",
            messages=[{"role": "user", "content": "2+2?"}],
            max_tokens=8,
            seed=5,
            stream=True,
            extra_headers={"x-tidegate-search": "majority-of-2"},
        )
        streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        async with aiohttp.ClientSession() as session, session.get(f"{address.url}/metrics") as response:
            metrics = await response.text()
    assert 'tidegate_search_choices_total{result="failed"} 3.0' in metrics  # the verifier was asked, and said no
    assert (raw.headers["x-tidegate-search-choice"], raw.headers["x-tidegate-search-support"]) == ("0", "0")
    with open_stores(DataDirectory.of(settings)) as stores:
        found = {
            call.id: call for e in stores.trajectories.list_episodes(splits=(Split.TRAIN,)) for call in e.interactions
        }
        groups = searched_groups(stores.trajectories.list_episodes(splits=(Split.TRAIN,)))
    record = found.pop(answer.id)
    assert [choice.delivered for choice in record.choices] == [True, False, False]
    assert answer_of(record).text == answer.choices[0].message.content
    assert len({choice.token_ids for choice in record.choices}) == 3  # draws of their own
    assert all(len(choice.token_ids) == len(choice.logprobs) for choice in record.choices)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(choice.token_ids) for choice in record.choices)
    (other,) = found.values()
    assert (other.sampling.search, answer_of(other).text) == ("majority-of-2", streamed)
    assert [group.id for group in groups] == [f"{record.episode_id} {index}" for index in range(3)]

"""Addresses of servers behind us: what is accepted, and that none leaks a password."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.app.engines import (
    Base,
    base_of,
    model_name,
    open_engine,
    opened_upstreams,
    other_names,
    upstream_state,
    with_upstream_model,
)
from tidegate.config import Settings, load_settings
from tidegate.config.engine import EngineSettings, upstream_url
from tidegate.config.settings import ModelSettings
from tidegate.core.errors import ConfigError
from tidegate.engines.remote import SglangEngine, VllmEngine
from upstream_server import UpstreamServer, running_upstream
from upstream_sglang import SglangServer


@pytest.mark.parametrize(
    ("given_url", "expected"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("https://models.example/team/v1", "https://models.example/team"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
        ("HTTP://Host", "http://host"),
    ],
)
def test_an_address_is_kept_without_its_version(given_url: str, expected: str) -> None:
    assert upstream_url(given_url) == expected


@pytest.mark.parametrize(
    "refused",
    [
        "127.0.0.1:8000",
        "file:///etc/passwd",
        "ftp://host",
        "gopher://host",
        "unix:/run/s",
        "http://",
        "http:///v1",
        "http://user:secret@host",
        "http://user@host",
        "http://host?x=1",
        "http://host#x",
        "http://host/a b",
        "http://host/\r\nX: y",
        "http://host:99999",
        "http://[::1",
        "",
    ],
)
def test_anything_but_a_plain_http_address_is_refused(refused: str) -> None:
    with pytest.raises(ValueError, match="address"):
        upstream_url(refused)


@given(st.text(max_size=40))
def test_whatever_is_accepted_has_no_user_query_or_blank(text: str) -> None:
    try:
        found = upstream_url(f"http://{text}")
    except ValueError:
        return
    assert found.startswith("http://")
    assert not set("@?# \r\n\t") & set(found.removeprefix("http://").partition("/")[0])
    assert upstream_url(found) == found


def test_a_password_in_an_address_is_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(None, {"engine": {"kind": "openai", "urls": ["http://user:hunter2@host"]}})
    assert "user or password" in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"kind": "openai"}, "kind = 'openai' and urls is missing"),
        *(
            (
                {name: value},
                f"{name} = {re.escape(repr(value))} has no effect on kind = 'embedded'; leave it out, or set kind to",
            )
            for name, value in (
                ("urls", ("http://host",)),
                ("logprobs", "processed"),
                ("check_interval_s", 1.0),
                ("first_token_timeout_s", 1.0),
                ("breaker_failures", 2),
                ("swap_timeout_s", 1.0),
            )
        ),
        ({"kind": "openai", "urls": ["http://host"], "logprobs": "processed"}, "logprobs = 'processed' has no effect"),
        ({"kind": "openai", "urls": ["http://host"], "swap_timeout_s": 9.0}, "swap_timeout_s = 9.0 has no effect"),
        ({"kind": "vllm", "urls": ["http://a/v1", "http://b", "http://A"]}, "'a'.* are named more than once"),
        ({"kind": "vllm", "urls": ["http://a", "b:1"]}, "only http:// and https:// addresses"),
        ({"kind": "vllm", "urls": "http://a"}, "valid tuple"),
        *(
            ({"kind": "vllm", "urls": ["http://host"], name: value}, f"{name} = .* has no effect with urls")
            for name, value in (
                ("replicas", 2),
                ("python", "/p"),
                ("arguments", ["--x"]),
                ("start_timeout_s", 1.0),
                ("max_restarts", 0),
            )
        ),
        ({"kind": "openai", "urls": ["http://host"], "replicas": 2}, "replicas = 2 has no effect on kind = 'openai'"),
        ({"kind": "embedded", "replicas": 2}, "replicas = 2 has no effect on kind = 'embedded'"),
        *(
            ({"kind": "vllm", "arguments": [argument]}, f"'{argument}' is set by Tidegate")
            for argument in ("--port", "--host=0.0.0.0", "--api_key=x", "--ssl-keyfile", "--uds", "--served-model-name")
        ),
    ],
)
def test_settings_that_contradict_themselves_are_refused(engine: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_settings(None, {"engine": engine})


def test_a_vllm_without_an_address_is_started_by_us() -> None:
    engine = load_settings(None, {"engine": {"kind": "vllm", "arguments": ["--max-loras", "2"]}}).engine
    assert (engine.supervised, engine.arguments) == (True, ("--max-loras", "2"))
    assert not EngineSettings(kind="vllm", urls=("http://host",)).supervised
    assert not EngineSettings().supervised


async def test_a_key_comes_from_the_variable_that_the_settings_name(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(engine=EngineSettings(kind="openai", urls=("http://host",), api_key_env="UPSTREAM_KEY"))
    monkeypatch.delenv("UPSTREAM_KEY", raising=False)
    with pytest.raises(ConfigError, match="names 'UPSTREAM_KEY', and no such variable is set"):
        async with opened_upstreams(settings):
            pass
    monkeypatch.setenv("UPSTREAM_KEY", "two\nlines")
    with pytest.raises(ConfigError, match="printable ASCII") as caught:
        async with opened_upstreams(settings):
            pass
    assert "two" not in str(caught.value)
    monkeypatch.setenv("UPSTREAM_KEY", "sk-1")
    async with opened_upstreams(settings) as (upstream,):
        assert upstream.url == "http://host"
        assert "sk-1" not in repr(upstream)


def test_an_upstreams_model_gives_its_name_and_no_weights() -> None:
    engine = EngineSettings(kind="openai", urls=("http://host",), model="Qwen/Qwen3-4B")
    settings = Settings(engine=engine)
    assert model_name(settings) == "Qwen-Qwen3-4B"
    assert other_names(settings) == ("Qwen/Qwen3-4B",)
    base = base_of(settings)
    assert base.directory is None
    assert len(base.sha256) == 64
    assert base.sha256 != base_of(Settings(engine=engine.model_copy(update={"model": "other"}))).sha256
    moved = Settings(engine=engine.model_copy(update={"urls": ("http://elsewhere",)}))
    assert base.sha256 == base_of(moved).sha256
    named = Settings(engine=engine, model=ModelSettings(name="mine"))
    assert model_name(named) == "mine"
    assert other_names(Settings()) == ()


@pytest.mark.parametrize(
    ("kind", "given_logprobs", "raw"),
    [("vllm", None, True), ("vllm", "processed", False), ("sglang", None, False), ("sglang", "raw", True)],
)
def test_each_kind_of_server_states_log_probabilities_in_its_own_way(kind: Any, given_logprobs: Any, raw: bool) -> None:
    assert EngineSettings(kind=kind, urls=("http://host",), logprobs=given_logprobs).raw_logprobs is raw


@pytest.mark.parametrize(("server", "kind"), [(SglangServer, "sglang"), (UpstreamServer, "vllm")])
async def test_the_settings_open_the_engine_of_their_kind(server: type[UpstreamServer], kind: Any) -> None:
    async with running_upstream(server) as running:
        settings = Settings(engine=EngineSettings(kind=kind, urls=(running.url,)))
        told = await upstream_state(settings, running.url)
        assert told.startswith(f"{running.url} serves 'tiny'")
        assert ("SGLang 0.5.23" in told) is (kind == "sglang")
        named = await with_upstream_model(settings)
        async with open_engine(named, Base(sha256="b" * 64, directory=None), replica="r") as engine:
            (member,) = engine._set.members  # type: ignore[attr-defined]
            assert type(member.engine) is {"sglang": SglangEngine, "vllm": VllmEngine}[kind]
            assert (await engine.health()).ready
            assert (await engine.sequence_logprobs(None, [5, 6, 7]))[1] < 0.0

"""Settings: precedence, and a clear ConfigError for whatever cannot be used."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tidegate.config import Settings, load_settings
from tidegate.config.database import without_password
from tidegate.config.settings import OTHER_VARIABLES
from tidegate.core.errors import ConfigError


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in OTHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_defaults_stand_without_file_and_environment() -> None:
    assert load_settings() == Settings()


def test_command_line_beats_environment_beats_file_beats_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "other.toml"
    file.write_text("[server]\nport = 1\nadmin_port = 1\nhost = 'file'\n")
    monkeypatch.setenv("TIDEGATE_SERVER__PORT", "2")
    monkeypatch.setenv("TIDEGATE_SERVER__ADMIN_PORT", "2")
    server = load_settings(file, {"server": {"port": 3}}).server
    assert (server.port, server.admin_port, server.host) == (3, 2, "file")
    assert server.max_body_bytes == Settings().server.max_body_bytes


def test_the_file_of_the_working_directory_is_read_unless_another_is_named(tmp_path: Path) -> None:
    (tmp_path / "tidegate.toml").write_text("data_dir = 'here'\n")
    (tmp_path / "other.toml").write_text("data_dir = 'there'\n")
    assert load_settings().data_dir == Path("here")
    assert load_settings(tmp_path / "other.toml").data_dir == Path("there")


def test_lists_and_sections_come_from_the_environment_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_SERVER__API_KEYS", '["a", "b"]')
    monkeypatch.setenv("TIDEGATE_SPLIT", '{"train": 0.5, "dev": 0.25, "sealed": 0.25}')
    settings = load_settings()
    assert settings.server.api_keys == ("a", "b")
    assert settings.split.sealed == 0.25


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"server": {"port": 70000}}, "server.port = 70000"),
        ({"server": {"port": "many"}}, "server.port = 'many'"),
        ({"server": {"prot": 1}}, "server.prot = 1"),
        ({"serve": {}}, "serve = {}"),
        ({"server": 3}, "server = 3"),
        ({"split": {"train": 0.5}}, "must sum to 1"),
        ({"split": {"train": 1.2, "dev": 0.0, "sealed": -0.2}}, "split.sealed = -0.2"),
        ({"training": {"learning_rate": float("inf")}}, "training.learning_rate = inf"),
        ({"training": {"learning_rate": float("nan")}}, "training.learning_rate = nan"),
        ({"training": {"objective": "gpro"}}, "training.objective = 'gpro'"),
        ({"cycle": {"nice": 20}}, "cycle.nice = 20"),
        ({"model": {"dtype": "int8"}}, "model.dtype = 'int8'"),
    ],
)
def test_an_unusable_value_is_named(overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(overrides=overrides)
    assert said in str(caught.value)
    assert "tidegate config show" in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("TIDEGATE_SERVER__PROT", "1", "server.prot"),
        ("TIDEGATE_SEVER__PORT", "1", "TIDEGATE_SEVER__PORT"),
        ("TIDEGATE_PORT", "1", "TIDEGATE_PORT"),
        ("tidegate_port", "1", "tidegate_port"),
        ("TIDEGATE_SERVER__API_KEYS", "abc", "written as JSON"),
        ("TIDEGATE_SERVER", "abc", "written as JSON"),
    ],
)
def test_an_unusable_variable_is_an_error(monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        load_settings()


@pytest.mark.parametrize("name", sorted(OTHER_VARIABLES))
def test_variables_that_are_no_settings_are_left_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "anything")
    assert load_settings() == Settings()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u@h/d?pass%77ord=hush", "postgresql://u@h/d?pass%77ord=***"),
        ("postgresql://u@h/d?host=x&%50%41ssword=hu?sh&user=v", "postgresql://u@h/d?host=x&%50%41ssword=***&user=v"),
        ("postgresql://u@h/d?sslpasswor%64=hush", "postgresql://u@h/d?sslpasswor%64=***"),
        ("postgresql://u@h/d?password%20=hush", "postgresql://u@h/d?password%20=***"),
        ("postgresql://u@h/d?host=x?password=hu=sh", "postgresql://u@h/d?host=x?password=***"),
        ("pass%77ord=hush", "pass%77ord=***"),
        ("postgresql://u@h/password?host=x&port=5", "postgresql://u@h/password?host=x&port=5"),
    ],
)
def test_a_password_under_an_encoded_name_is_hidden(url: str, shown: str) -> None:
    assert without_password(url) == shown


@pytest.mark.parametrize("section", [{"api_keys": {"hush": 1}}, {"api_keys": [["hush"]]}, {"api_key": "hush"}])
def test_keys_never_reach_a_message(section: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(overrides={"server": section})
    assert "server.api_key" in str(caught.value)
    assert "hush" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml' does not exist"):
        load_settings(tmp_path / "nowhere.toml")


@pytest.mark.parametrize("content", [b"port = ", b"\xff\xfe", b"[server]\n[server]\n"])
def test_a_file_that_is_not_toml_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broken.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.toml' cannot be read as TOML"):
        load_settings(file)


def test_a_directory_is_no_settings_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read as TOML"):
        load_settings(tmp_path)


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        Settings().server.port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("training", "said"),
    [
        ({"averaging": [0.5], "restart": "base"}, r"averaging = \[0\.5\] with restart = 'base'"),
        ({"kl_coefficient": 0.1, "objective": "dpo"}, "kl_coefficient = 0.1 has no effect on objective = 'dpo'"),
        ({"kl_coefficient": 0.1, "objective": "kto"}, "kl_coefficient = 0.1 has no effect on objective = 'kto'"),
        *(({"clip_low": 0.1, "objective": name}, "clip_low.* has no effect") for name in ("sft", "reinforce", "dpo")),
        ({"clip_high": 0.0, "objective": "kto"}, "clip_high.* has no effect on objective = 'kto'"),
        *(
            (
                {"objective": "grpo", "reward_scale": scale, "baseline": baseline},
                f"reward_scale = '{scale}' has no effect on b",
            )
            for scale, baseline in (("none", "leave_one_out"), ("batch", "slice"))
        ),
        *(
            (
                {**setting, "objective": name},
                f"has no effect on objective = '{name}'; leave it .*, or set objective to 'grpo'",
            )
            for name in ("sft", "dpo", "kto")
            for setting in (
                {"baseline": "slice"},
                {"reward_scale": "none"},
                {"slice_half_life": 9.0},
                {"aggregate": "sequence"},
                {"max_completion": 9},
                {"importance_cap": 0.0},
            )
        ),
        *(({"preference_beta": 0.2, "objective": n}, "preference_beta = 0.2 has no effect") for n in ("sft", "cispo")),
        ({"objective": "grpo", "slice_half_life": 9.0}, "slice_half_life = 9.0 has no effect on baseline = 'group'"),
        ({"objective": "grpo", "max_completion": 9}, "max_completion = 9 has no effect on aggregate = 'token'"),
    ],
)
def test_what_would_have_no_effect_is_refused(training: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_settings(None, {"training": training})


def test_a_batch_that_can_never_be_large_enough_is_refused() -> None:
    with pytest.raises(ConfigError, match="min_fresh = 17 with max_examples = 16: no batch"):
        load_settings(None, {"curation": {"min_fresh": 17, "max_examples": 16}})
    load_settings(None, {"curation": {"min_fresh": 16, "max_examples": 16}})


def test_what_takes_effect_is_accepted() -> None:
    for training in (
        {"averaging": [0.5]},
        {"kl_coefficient": 0.1},
        {"objective": "cispo", "clip_low": 0.5, "clip_high": 2.0, "kl_coefficient": 0.1},
        {"objective": "gspo", "reward_scale": "batch"},
        {"objective": "grpo", "aggregate": "dr_grpo", "max_completion": 9, "importance_cap": 0.0},
        {"objective": "reinforce", "baseline": "slice", "slice_half_life": 9.0},
        {"objective": "dpo", "preference_beta": 0.2},
        {"max_completion": 512, "preference_beta": 0.1},
        {"restart": "base", "objective": "kto"},
    ):
        load_settings(None, {"training": training})


OPEN, SEALED = "postgresql://a@h/open", "postgresql://b@h/sealed"


def test_databases_on_a_server_are_two_urls_and_perhaps_their_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_DATABASE__PASSWORD", "hush1")
    monkeypatch.setenv("TIDEGATE_DATABASE__SEALED_URL", "postgres://b:hush2@h/sealed?password=hush3&sslmode=require")
    database = load_settings(None, {"database": {"url": OPEN}}).database
    assert database.password is not None
    assert database.password.get_secret_value() == "hush1"
    told = f"{database!r} {database} {database.model_dump_json()} {database.shown()}"
    assert "hush" not in told
    assert database.shown() == {
        "url": OPEN,
        "sealed_url": "postgres://b:***@h/sealed?password=***&sslmode=require",
        "password": "(hidden)",
        "sealed_password": None,
    }


@pytest.mark.parametrize(
    ("sealed", "same"),
    [
        (OPEN, True),
        ("postgresql://a:pw@h:5432/open", True),
        ("postgres://a@h/open?sslmode=require", True),
        ("postgresql://a@/open?host=h", True),
        ("postgresql://a@h/open?options=-csearch_path%3Dsealed", False),
        ("postgresql://b@h/open", False),
        ("postgresql://a@h:5433/open", False),
        ("postgresql://a@other/open", False),
        (SEALED, False),
    ],
)
def test_sealed_traffic_never_shares_a_place_with_open_traffic(sealed: str, same: bool) -> None:
    given = {"database": {"url": OPEN, "sealed_url": sealed}}
    if not same:
        assert load_settings(None, given).database.sealed_url is not None
        return
    with pytest.raises(
        ConfigError, match=r"name the same place.*sealed traffic lies in a database or schema of its own"
    ):
        load_settings(None, given)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"url": OPEN}, "database.url is set and database.sealed_url is not"),
        ({"sealed_url": SEALED}, "database.sealed_url is set and database.url is not"),
        ({"password": "hush"}, "database.password has no effect without database.url"),
        ({"sealed_password": "hush"}, "database.sealed_password has no effect without database.sealed_url"),
        ({"sealed_url": SEALED, "url": "postgresql://u:hush@h/d", "password": "hush"}, "database.url holds a password"),
        (
            {"url": OPEN, "sealed_url": "postgresql://u@h/s?password=hush", "sealed_password": "hush"},
            "sealed_url holds a",
        ),
        ({"url": "mysql://u:hush@h/d", "sealed_url": SEALED}, "database.url: .*scheme is not 'postgresql'"),
        ({"url": "sqlite:///hush.db", "sealed_url": SEALED}, "database.url: .*scheme is not 'postgresql'"),
        ({"url": "postgresql://u:hu@sh@h/d", "sealed_url": SEALED}, "not percent-encoded"),
        ({"url": "postgresql://u:12/hush@h/d", "sealed_url": SEALED}, "not percent-encoded"),
        ({"url": "postgresql://u:hush/x@h/d", "sealed_url": SEALED}, "cannot be read"),
        ({"url": "postgresql://u:12#hush@h/d", "sealed_url": SEALED}, "not percent-encoded"),
        ({"url": ["hush"], "sealed_url": SEALED}, "database.url"),
        ({"pasword": "hush"}, "database.pasword"),
        ({"url": OPEN, "sealed_url": OPEN, "password": "hush"}, "name the same place"),
    ],
)
def test_an_unusable_database_is_told_without_its_password(section: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load_settings(None, {"database": section})
    assert "hush" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "overrides",
    [
        {"databse": {"url": "postgresql://u:hush@h/d", "password": "hush"}},
        {"database": "postgresql://u:hush@h/d"},
        {"server": {"host": ["postgresql://u:hush@h/d"]}},
        {"url": "postgresql://u:hush@h/d"},
    ],
)
def test_a_password_in_the_wrong_place_is_not_told_either(overrides: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(None, overrides)
    assert "hush" not in "".join(traceback.format_exception(caught.value))

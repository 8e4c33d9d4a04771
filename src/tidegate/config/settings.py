"""All settings: one source of defaults, read from ``tidegate.toml`` and ``TIDEGATE_*`` variables.

Precedence: command line, environment (``TIDEGATE_SERVER__PORT=8080``), file, default. Unknown names are
errors, in the environment too. The gate's thresholds are not here: they live in the policy file, whose hash is
in every certificate.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from tidegate.config.database import DatabaseSettings, without_password
from tidegate.config.engine import EngineSettings
from tidegate.config.fields import Finite, Fraction, Port, Positive, Section, Share
from tidegate.config.shadow import ShadowSettings
from tidegate.config.training import TrainingSettings
from tidegate.core.errors import ConfigError

DEFAULT_FILE = Path("tidegate.toml")
ENV_PREFIX = "TIDEGATE_"
OTHER_VARIABLES = frozenset({"TIDEGATE_API_KEY", "TIDEGATE_CACHE_DIR"})
"""Variables with our prefix that are no settings: the key that clients send, where downloaded models are kept."""


class ServerSettings(Section):
    """The public HTTP port and the admin port beside it."""

    host: str = Field(default="127.0.0.1", description="Address that the public API listens on.")
    port: Port = Field(default=8420, description="Port of the public API; 0 picks a free one.")
    admin_port: Port = Field(default=8421, description="Port of the admin API, always on loopback; 0 picks a free one.")
    api_keys: tuple[str, ...] = Field(
        default=(), description="Accepted bearer tokens; empty accepts every caller (loopback hosts only)."
    )
    max_body_bytes: Positive = Field(default=4 << 20, description="Largest request body; larger ones get 413.")
    request_timeout_s: Finite = Field(default=300.0, gt=0, description="Longest time that one request may take.")
    episode_ttl_s: Finite = Field(
        default=1800.0,
        gt=0,
        description="An episode stays on the release that it began with for this long after its last call.",
    )
    max_search: int = Field(
        default=8,
        ge=0,
        le=128,
        description="Most choices that a request may have searched for its best or commonest; below 2 none may.",
    )
    search_verify_s: Finite = Field(
        default=10.0,
        gt=0,
        description="Longest time that a verifier may take over the choices of one search; the rest is unverified.",
    )


class ModelSettings(Section):
    """The frozen base model: what is served here or by a server that takes adapters, and trained on."""

    path: str = Field(
        default="smollm2-135m",
        description="Directory or hub name of a causal LM; 'smollm2-135m' is fetched, checked and cached.",
    )
    name: str | None = Field(
        default=None, description="Name in /v1/models and release ids; default: last part of the path."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="'auto' is bfloat16 where the processor computes in it natively, else float32."
    )
    max_batch: Positive = Field(default=32, description="Most choices decoded together.")
    max_queue: Positive = Field(default=256, description="Most choices waiting; beyond it requests get 429.")
    max_context: Positive = Field(default=2048, description="Longest prompt plus completion, in tokens.")
    max_resident_adapters: Positive = Field(
        default=4, description="Most adapters kept in memory, the champion included."
    )
    threads: int = Field(default=0, ge=0, description="Compute threads; 0 takes all processors.")


class SplitSettings(Section):
    """Shares of users whose traffic is trained on, screened on, and sealed for the gate."""

    train: Fraction = Field(default=0.85, description="Share of users whose episodes are trained on.")
    dev: Fraction = Field(default=0.05, description="Share of users whose tasks screen candidates.")
    sealed: Fraction = Field(default=0.10, description="Share of users whose tasks only the gate ever reads.")

    @model_validator(mode="after")
    def _sums_to_one(self) -> SplitSettings:
        total = self.train + self.dev + self.sealed
        if abs(total - 1.0) > 1e-9:
            raise ValueError(f"train + dev + sealed is {total:g}; the shares must sum to 1")
        return self


class RolloutSettings(Section):
    """What a cycle asks the champion again, to learn from more answers than its users got."""

    samples: int = Field(default=0, ge=0, description="Answers sampled per task; 0 asks nothing.")
    max_tasks: Positive = Field(
        default=64, description="Most tasks of train users that are asked, those first that were solved rarely."
    )
    keep_per_task: Positive = Field(
        default=4,
        description="Most verified answers to one task that train with objective 'sft'; other objectives compare the "
        "answers of a group and take all of them.",
    )
    temperature: Finite = Field(
        default=1.0, gt=0, le=2, description="Sampling temperature; nothing else filters what is sampled."
    )
    rationalize: bool = Field(
        default=True,
        description="With objective 'sft': ask a task that nobody solved once more with the right answer as a hint, "
        "and train on a verified answer without the hint.",
    )
    max_error_share: Fraction = Field(
        default=0.2,
        description="The cycle abstains when a larger share of the answers was cut short by a fault or came without "
        "token ids.",
    )


class CurationSettings(Section):
    """From scored episodes to a training batch."""

    success_threshold: float = Field(
        default=1.0, gt=0.0, le=1.0, description="Lowest score of an episode that is trained on."
    )
    near_success_quantile: Fraction = Field(
        default=0.55,
        description="Scores below the threshold that exceed this quantile of the window's scores, and half the "
        "threshold, train as near-successes; 1 lets none in.",
    )
    near_success_weight: float = Field(
        default=0.3, gt=0.0, le=1.0, description="Weight of a near-success beside a success."
    )
    max_age_days: Finite = Field(
        default=90.0,
        gt=0,
        description="Episodes whose last call is older at the window's end do not train as fresh examples.",
    )
    max_examples: Positive = Field(
        default=400,
        description="Most fresh examples of a batch, and most demonstrations; beyond them a sample is taken.",
    )
    max_per_user: Positive = Field(default=20, description="Most examples of one user in a batch.")
    max_user_share: float = Field(
        default=0.005,
        gt=0.0,
        le=1.0,
        description="Largest share of one user in the weight of a batch, where that is more than one example's worth.",
    )
    min_fresh: Positive = Field(default=16, description="Fewest verified fresh examples that are worth a cycle.")
    max_per_prompt: Positive = Field(default=3, description="Most copies of one prompt's exact same answer path.")
    max_per_cluster: Positive = Field(
        default=3, description="Most near-copies: prompt and answer nearly the same, by the same strategy."
    )
    replay_share: Share = Field(
        default=0.15, description="Share of a batch that is replayed from earlier cycles' batches, besides the fresh."
    )
    demonstration_share: Share = Field(
        default=0.10,
        description="Largest share of demonstrations among the examples of a kind with min_fresh fresh successes; the "
        "fewer it has, the more of them train.",
    )

    @model_validator(mode="after")
    def _can_be_met(self) -> CurationSettings:
        if self.min_fresh > self.max_examples:
            raise ValueError(
                f"min_fresh = {self.min_fresh} with max_examples = {self.max_examples}: no batch would ever be worth a "
                "cycle; lower the one or raise the other"
            )
        return self


class CycleSettings(Section):
    """When and how cycles run."""

    max_calls: Positive = Field(default=4, description="Most model calls of one evaluated episode.")
    episode_timeout_s: Finite = Field(
        default=120.0, gt=0, description="A gate episode that takes longer counts as failed."
    )
    max_dev_tasks: Positive = Field(
        default=64, description="Most tasks of dev users that a screen asks, the latest ones."
    )
    concurrency: Positive = Field(default=32, description="Gate episodes in flight at once.")
    nice: int = Field(
        default=10, ge=0, le=19, description="How far a cycle steps back behind serving on the processor."
    )


class WatchSettings(Section):
    """What looks at live traffic while a canary or a holdback runs."""

    interval_s: Finite = Field(default=30.0, gt=0, description="Time between two looks at new episodes.")
    metric: str = Field(
        default="helpful",
        min_length=1,
        description="Feedback that counts as the outcome of an episode without a verifier: a bool, or a number in "
        "[0, 1].",
    )
    verdict_wait_s: Finite = Field(
        default=3600.0,
        gt=0,
        description="An episode that has no verdict and no feedback after so long counts for nothing.",
    )
    prompts: Path | None = Field(
        default=None,
        description="Task file of canary prompts: a canary that answers one of them wrongly, greedily, is rolled back.",
    )


class Settings(BaseSettings):
    """Everything that can be set. Built by :func:`load_settings`; the constructor reads nothing by itself."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True, hide_input_in_errors=True
    )

    data_dir: Path = Field(default=Path(".tidegate"), description="SQLite databases, adapters, keys and manifests.")
    policy: Path | None = Field(default=None, description="Gate policy file; default: the strict policy that ships.")
    database: DatabaseSettings = Field(default_factory=DatabaseSettings)
    server: ServerSettings = Field(default_factory=ServerSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    split: SplitSettings = Field(default_factory=SplitSettings)
    rollouts: RolloutSettings = Field(default_factory=RolloutSettings)
    curation: CurationSettings = Field(default_factory=CurationSettings)
    training: TrainingSettings = Field(default_factory=TrainingSettings)
    cycle: CycleSettings = Field(default_factory=CycleSettings)
    watch: WatchSettings = Field(default_factory=WatchSettings)
    shadow: ShadowSettings = Field(default_factory=ShadowSettings)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only explicit values: :func:`load_settings` owns the precedence."""
        del settings_cls, env_settings, dotenv_settings, file_secret_settings
        return (init_settings,)


def load_settings(file: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """Merge defaults, file, environment and ``overrides`` (strongest last).

    Args:
        file: a TOML file; None reads ``tidegate.toml`` in the working directory when there is one.
        overrides: nested values from the command line, e.g. ``{"server": {"port": 8080}}``.

    Raises:
        ConfigError: the named file is missing or not TOML, a name is unknown, or a value is out of range.
            Values of secret settings are left out of the message.
    """
    source = str(file or DEFAULT_FILE)
    values: dict[str, Any] = {}
    if file is not None or DEFAULT_FILE.exists():
        values = _read_toml(file or DEFAULT_FILE)
    values = _merged(values, _read_environment())
    values = _merged(values, overrides or {})
    try:
        return Settings(**values)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in problem['loc'])}{_shown_input(problem['loc'], problem['input'])}: "
            f"{problem['msg']}"
            for problem in error.errors()
        )
        raise ConfigError(
            f"settings from {source!r}, TIDEGATE_* variables and options are not usable: {problems}; "
            "'tidegate config show' lists all names and values"
        ) from error


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"settings file {str(file)!r} does not exist; 'tidegate init' writes one") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"settings file {str(file)!r} cannot be read as TOML: {error}") from error


def _read_environment() -> dict[str, Any]:
    known = set(Settings.model_fields)
    for name in sorted(os.environ):
        upper = name.upper()
        if not upper.startswith(ENV_PREFIX) or upper in OTHER_VARIABLES:
            continue
        section = upper.removeprefix(ENV_PREFIX).split("__")[0].lower()
        if section not in known:
            raise ConfigError(
                f"environment variable {name!r} sets no setting; it must be TIDEGATE_ and one of "
                f"{', '.join(sorted(known))}, with __ before a name in a section (TIDEGATE_SERVER__PORT)"
            )
    try:
        return EnvSettingsSource(Settings)()
    except SettingsError as error:
        raise ConfigError(
            f"a TIDEGATE_* environment variable is not usable: {error}; sections and lists are written as JSON, "
            "e.g. TIDEGATE_SERVER__API_KEYS='[\"key\"]'"
        ) from error


def _shown_input(location: tuple[int | str, ...], value: object) -> str:
    """The value for a message; keys and passwords never reach a log."""
    return "" if any(_is_secret(str(part)) for part in location) else f" = {_redacted(value)!r}"


def _is_secret(name: str) -> bool:
    return any(word in name.lower() for word in ("key", "password", "url", "database"))


def _redacted(value: object) -> object:
    """A value of a section that may be a misspelt one: secrets are hidden wherever they stand."""
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, object]", value).items()
        return {name: "***" if _is_secret(name) else _redacted(inner) for name, inner in pairs}
    if isinstance(value, list | tuple):
        return [_redacted(item) for item in cast("list[object]", value)]
    return without_password(value) if isinstance(value, str) else value


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for name, value in above.items():
        under = result.get(name)
        if isinstance(value, Mapping) and isinstance(under, Mapping):
            result[name] = _merged(cast("Mapping[str, Any]", under), cast("Mapping[str, Any]", value))
        else:
            result[name] = value
    return result

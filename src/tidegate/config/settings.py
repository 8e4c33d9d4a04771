"""All settings: one source of defaults, read from ``tidegate.toml`` and ``TIDEGATE_*`` variables.

Precedence: command line, environment (``TIDEGATE_SERVER__PORT=8080``), file, default. Unknown names are
errors. The gate's thresholds are not here: they live in the policy file, whose hash is in every certificate.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from tidegate.core.errors import ConfigError

DEFAULT_FILE = Path("tidegate.toml")

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Port = Annotated[int, Field(ge=0, le=65535)]
Positive = Annotated[int, Field(ge=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ServerSettings(_Section):
    """The public HTTP port and the admin port beside it."""

    host: str = Field(default="127.0.0.1", description="Address that the public API listens on.")
    port: Port = Field(default=8420, description="Port of the public API; 0 picks a free one.")
    admin_port: Port = Field(default=8421, description="Port of the admin API, always on loopback; 0 picks a free one.")
    api_keys: tuple[str, ...] = Field(
        default=(), description="Accepted bearer tokens; empty accepts every caller (loopback hosts only)."
    )
    max_body_bytes: Positive = Field(default=4 << 20, description="Largest request body; larger ones get 413.")
    request_timeout_s: float = Field(default=300.0, gt=0, description="Longest time that one request may take.")
    episode_ttl_s: float = Field(
        default=1800.0,
        gt=0,
        description="An episode stays on the release that it began with for this long after its last call.",
    )


class ModelSettings(_Section):
    """The frozen base model."""

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


class SplitSettings(_Section):
    """Shares of users whose traffic is trained on, screened on, and sealed for the gate."""

    train: Fraction = 0.85
    dev: Fraction = 0.05
    sealed: Fraction = 0.10

    @model_validator(mode="after")
    def _sums_to_one(self) -> SplitSettings:
        total = self.train + self.dev + self.sealed
        if abs(total - 1.0) > 1e-9:
            raise ValueError(f"train + dev + sealed is {total:g}; the shares must sum to 1")
        return self


class CurationSettings(_Section):
    """From scored episodes to a training batch."""

    success_threshold: Fraction = Field(default=1.0, description="Lowest score of an episode that is trained on.")
    max_examples: Positive = Field(default=400, description="Budget of a batch; above it examples are subsampled.")
    max_per_user: Positive = Field(default=20, description="Most examples of one user in a batch.")
    min_fresh: Positive = Field(default=16, description="Fewest verified fresh examples that are worth a cycle.")
    max_per_prompt: Positive = Field(default=3, description="Most copies of one prompt's exact same answer path.")


class TrainingSettings(_Section):
    """The LoRA step."""

    objective: Literal["sft"] = "sft"
    restart: Literal["champion", "base"] = Field(
        default="champion", description="Weights that a challenger starts from."
    )
    rank: Positive = 16
    alpha: Positive = 32
    learning_rate: float = Field(default=5e-4, gt=0)
    epochs: Positive = 2
    batch_size: Positive = 8
    max_grad_norm: float = Field(default=1.0, gt=0)
    warmup_fraction: Fraction = 0.1
    weight_decay: float = Field(default=0.0, ge=0)
    timeout_s: float = Field(default=3600.0, gt=0, description="A training run that takes longer is ended and fails.")
    seed: int = 0


class CycleSettings(_Section):
    """When and how cycles run."""

    max_calls: Positive = Field(default=4, description="Most model calls of one evaluated episode.")
    episode_timeout_s: float = Field(
        default=120.0, gt=0, description="A gate episode that takes longer counts as failed."
    )
    concurrency: Positive = Field(default=32, description="Gate episodes in flight at once.")
    nice: int = Field(
        default=10, ge=0, le=19, description="How far a cycle steps back behind serving on the processor."
    )


class Settings(BaseSettings):
    """Everything that can be set. Built by :func:`load_settings`; the constructor reads nothing by itself."""

    model_config = SettingsConfigDict(env_prefix="TIDEGATE_", env_nested_delimiter="__", extra="forbid", frozen=True)

    data_dir: Path = Field(default=Path(".tidegate"), description="Databases, adapters, keys and manifests.")
    policy: Path | None = Field(default=None, description="Gate policy file; default: the strict policy that ships.")
    server: ServerSettings = Field(default_factory=ServerSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    split: SplitSettings = Field(default_factory=SplitSettings)
    curation: CurationSettings = Field(default_factory=CurationSettings)
    training: TrainingSettings = Field(default_factory=TrainingSettings)
    cycle: CycleSettings = Field(default_factory=CycleSettings)

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
    """
    source = str(file or DEFAULT_FILE)
    values: dict[str, Any] = {}
    if file is not None or DEFAULT_FILE.exists():
        values = _read_toml(file or DEFAULT_FILE)
    values = _merged(values, EnvSettingsSource(Settings)())
    values = _merged(values, overrides or {})
    try:
        return Settings(**values)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in problem['loc'])} = {problem['input']!r}: {problem['msg']}"
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


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for name, value in above.items():
        under = result.get(name)
        if isinstance(value, Mapping) and isinstance(under, Mapping):
            result[name] = _merged(cast("Mapping[str, Any]", under), cast("Mapping[str, Any]", value))
        else:
            result[name] = value
    return result

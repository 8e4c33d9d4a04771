"""Which engine answers: one in this process, or servers outside it, by URL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from tidegate.config.fields import Finite, Positive, Section
from tidegate.core.agreement import DEFAULT_TOLERANCE


def upstream_url(value: str) -> str:
    """The address of a server as requests are made to it: without a trailing slash or ``/v1``.

    Raises:
        ValueError: it is no plain http or https address. The message repeats no password.
    """
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"the address cannot be read ({error}); write http://HOST:PORT") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("only http:// and https:// addresses with a host are accepted; write http://HOST:PORT")
    if parts.username is not None or parts.password is not None:
        raise ValueError("the address holds a user or password; put the key into a variable, see engine.api_key_env")
    if parts.query or parts.fragment or any(character.isspace() or not character.isprintable() for character in value):
        raise ValueError("the address holds a query, a fragment or blanks; write http://HOST:PORT or .../v1")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{host}{'' if port is None else f':{port}'}{path}"


def place_of(url: str) -> str:
    """An address without its scheme: the name of a replica in records, messages and metrics."""
    return url.partition("://")[2]


def _each_once(urls: tuple[str, ...]) -> tuple[str, ...]:
    places = [place_of(url) for url in urls]
    twice = sorted({place for place in places if places.count(place) > 1})
    if twice:
        raise ValueError(f"{twice} are named more than once; each server is one replica")
    return urls


_READ_WITH: Mapping[str, tuple[str, ...]] = {
    "urls": ("vllm", "sglang", "openai"),
    "logprobs": ("vllm", "sglang"),
    "check_interval_s": ("vllm", "sglang", "openai"),
    "first_token_timeout_s": ("vllm", "sglang", "openai"),
    "breaker_failures": ("vllm", "sglang", "openai"),
    "swap_timeout_s": ("vllm", "sglang"),
    "agreement_max_nats": ("embedded", "vllm", "sglang"),
    "agreement_mean_nats": ("embedded", "vllm", "sglang"),
}
"""With which kinds a setting is read at all. Those beside the address may wait in a file for 'serve --upstream'."""

RECORDER_ONLY = (
    "this upstream takes no adapters: recorder only; for learning set engine.kind to 'vllm', 'sglang' or 'embedded'"
)


class EngineSettings(Section):
    """What answers. With 'vllm', 'sglang' and 'openai' that is one server outside this process, or several, by URL."""

    kind: Literal["embedded", "vllm", "sglang", "openai"] = Field(
        default="embedded",
        description="'embedded' runs the model in this process; 'vllm' and 'sglang' are servers that load adapters "
        "while they run; 'openai' is any server with OpenAI's API, in front of which all is recorded and nothing "
        "trained.",
    )
    urls: Annotated[tuple[Annotated[str, AfterValidator(upstream_url)], ...], AfterValidator(_each_once)] = Field(
        default=(),
        description="Addresses of the servers, http or https, with or without '/v1'; one a replica, all with the same "
        "weights. Redirects are not followed.",
    )
    model: str | None = Field(
        default=None, min_length=1, description="Name of the model there; default: the only one that they list."
    )
    api_key_env: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="Name of the environment variable with the key of those servers; the key itself is no setting.",
    )
    connect_timeout_s: Finite = Field(default=5.0, gt=0, description="Longest time until a server is connected.")
    read_timeout_s: Finite = Field(
        default=120.0, gt=0, description="Longest silence of a server before and between tokens; then 504."
    )
    check_interval_s: Finite = Field(
        default=5.0, gt=0, description="Time between two looks at a replica's health and adapters."
    )
    first_token_timeout_s: Finite = Field(
        default=30.0,
        gt=0,
        description="A call that hears nothing for so long, from a replica that says nothing to others either, counts "
        "as failed. Longer than the longest prompt takes.",
    )
    breaker_failures: Positive = Field(
        default=5,
        description="Failed calls in a row after which a replica leaves service until it has answered one; without "
        "effect on a single server.",
    )
    swap_timeout_s: Finite = Field(
        default=60.0,
        gt=0,
        description="Longest time that one replica may take to load or prove an adapter before a swap goes on without "
        "it.",
    )
    logprobs: Literal["raw", "processed"] | None = Field(
        default=None,
        description="What the server states: 'raw' log-probabilities are those of temperature 1, so that answers at "
        "other temperatures train without importance weights. vLLM is told by --logprobs-mode (default: 'raw'), SGLang "
        "by SGLANG_RETURN_ORIGINAL_LOGPROB (default: 'processed').",
    )
    agreement_max_nats: Finite = Field(
        default=DEFAULT_TOLERANCE.max_nats,
        gt=0,
        description="Largest difference of one token's log-probability between the serving engine and the trainer with "
        "which an adapter is still published.",
    )
    agreement_mean_nats: Finite = Field(
        default=DEFAULT_TOLERANCE.mean_nats, gt=0, description="The same for the mean of all tokens compared."
    )

    @property
    def raw_logprobs(self) -> bool:
        """Whether the server states log-probabilities of temperature 1."""
        return self.logprobs == "raw" if self.logprobs is not None else self.kind == "vllm"

    @model_validator(mode="after")
    def _take_effect(self) -> EngineSettings:
        """Refuse what the kind would silently ignore, and a kind that lacks what it needs."""
        for name, kinds in _READ_WITH.items():
            value, default = getattr(self, name), type(self).model_fields[name].default
            if value != default and self.kind not in kinds:
                raise ValueError(
                    f"{name} = {value!r} has no effect on kind = {self.kind!r}; leave it out, or set kind to "
                    f"{' or '.join(map(repr, kinds))}"
                )
        if self.kind != "embedded" and not self.urls:
            raise ValueError(f"kind = {self.kind!r} and urls is missing; set it to ['http://HOST:PORT']")
        return self

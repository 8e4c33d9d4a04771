"""Which engine answers: one in this process, or servers outside it, by URL or started by us."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
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


_STARTED_BY_US = ("replicas", "python", "arguments", "start_timeout_s", "max_restarts")
"""Settings of servers that have no address because Tidegate starts them."""
_READ_WITH: Mapping[str, tuple[str, ...]] = {
    "urls": ("vllm", "sglang", "openai"),
    "logprobs": ("vllm", "sglang"),
    "check_interval_s": ("vllm", "sglang", "openai"),
    "first_token_timeout_s": ("vllm", "sglang", "openai"),
    "breaker_failures": ("vllm", "sglang", "openai"),
    "swap_timeout_s": ("vllm", "sglang"),
    "agreement_max_nats": ("embedded", "vllm", "sglang"),
    "agreement_mean_nats": ("embedded", "vllm", "sglang"),
    **dict.fromkeys(_STARTED_BY_US, ("vllm",)),
}
"""With which kinds a setting is read at all. Those beside the address may wait in a file for 'serve --upstream'."""
_NOT_YOURS = frozenset(
    {
        "--model", "--served-model-name", "--uds", "--host", "--port", "--api-key", "--root-path", "--enable-lora",
        "--no-enable-lora", "--logprobs-mode", "--api-server-count", "--headless", "--config",
    }
)  # fmt: skip
"""Arguments without which Tidegate could not find, prove or protect the server that it started."""


def server_arguments(value: tuple[str, ...]) -> tuple[str, ...]:
    """Arguments that a user adds to those of the server.

    Raises:
        ValueError: one of them is ours to set.
    """
    for argument in value:
        name = argument.partition("=")[0].replace("_", "-")
        if name in _NOT_YOURS or name.startswith("--ssl-"):
            raise ValueError(
                f"{argument!r} is set by Tidegate; leave it out, or start the server yourself and set urls"
            )
    return value


RECORDER_ONLY = (
    "this upstream takes no adapters: recorder only; for learning set engine.kind to 'vllm', 'sglang' or 'embedded'"
)


class EngineSettings(Section):
    """What answers. With 'vllm', 'sglang' and 'openai' that is a server outside this process, or several: yours, by
    URL, or, with 'vllm', our own."""

    kind: Literal["embedded", "vllm", "sglang", "openai"] = Field(
        default="embedded",
        description="'embedded' runs the model in this process; 'vllm' and 'sglang' are servers that load adapters "
        "while they run, a vLLM started by Tidegate unless urls is set; 'openai' is any server with OpenAI's API, in "
        "front of which all is recorded and nothing trained.",
    )
    urls: Annotated[tuple[Annotated[str, AfterValidator(upstream_url)], ...], AfterValidator(_each_once)] = Field(
        default=(),
        description="Addresses of the servers, http or https, with or without '/v1'; one a replica, all with the same "
        "weights. Redirects are not followed. Without one Tidegate starts a vLLM of its own (kind 'vllm').",
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

    replicas: Positive = Field(default=1, description="How many vLLM servers Tidegate starts.")
    python: Path | None = Field(
        default=None,
        description="Interpreter that has vLLM; default: the environment that 'tidegate engine install vllm' makes.",
    )
    arguments: Annotated[tuple[str, ...], AfterValidator(server_arguments)] = Field(
        default=(),
        description="Further arguments of the vLLM that Tidegate starts, e.g. ['--enable-auto-tool-choice', "
        "'--tool-call-parser', 'hermes']; they win over what the other settings say.",
    )
    start_timeout_s: Finite = Field(
        default=900.0, gt=0, description="A server that Tidegate starts and that does not serve by then is ended."
    )
    max_restarts: int = Field(
        default=5, ge=0, description="How often in a row a server that ended is started again, at growing intervals."
    )

    @property
    def supervised(self) -> bool:
        """Whether Tidegate starts the server itself."""
        return self.kind == "vllm" and not self.urls

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
            if value != default and name in _STARTED_BY_US and self.urls:
                raise ValueError(
                    f"{name} = {value!r} has no effect with urls: the server there is not started by Tidegate; leave "
                    "one of the two out"
                )
        if self.kind == "openai" and not self.urls:
            raise ValueError(f"kind = {self.kind!r} and urls is missing; set it to ['http://HOST:PORT']")
        return self

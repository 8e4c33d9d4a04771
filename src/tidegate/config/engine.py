"""Which engine answers: one in this process, or a server outside it, by URL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from tidegate.config.fields import Finite, Section


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


_READ_WITH: Mapping[str, tuple[str, ...]] = {
    "url": ("vllm", "sglang", "openai"),
    "logprobs": ("vllm", "sglang"),
}
"""With which kinds a setting is read at all. Those beside the address may wait in a file for 'serve --upstream'."""

RECORDER_ONLY = (
    "this upstream takes no adapters: recorder only; for learning set engine.kind to 'vllm', 'sglang' or 'embedded'"
)


class EngineSettings(Section):
    """What answers. With 'vllm', 'sglang' and 'openai' that is a server outside this process, by URL."""

    kind: Literal["embedded", "vllm", "sglang", "openai"] = Field(
        default="embedded",
        description="'embedded' runs the model in this process; 'vllm' and 'sglang' are servers that load adapters "
        "while they run; 'openai' is any server with OpenAI's API, in front of which all is recorded and nothing "
        "trained.",
    )
    url: Annotated[str, AfterValidator(upstream_url)] | None = Field(
        default=None,
        description="Address of the server, http or https, with or without '/v1'. Redirects are not followed.",
    )
    model: str | None = Field(
        default=None, min_length=1, description="Name of the model there; default: the only one that it lists."
    )
    api_key_env: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="Name of the environment variable with the key of that server; the key itself is no setting.",
    )
    connect_timeout_s: Finite = Field(default=5.0, gt=0, description="Longest time until that server is connected.")
    read_timeout_s: Finite = Field(
        default=120.0, gt=0, description="Longest silence of that server before and between tokens; then 504."
    )
    logprobs: Literal["raw", "processed"] | None = Field(
        default=None,
        description="What the server states: 'raw' log-probabilities are those of temperature 1, so that answers at "
        "other temperatures train without importance weights. vLLM is told by --logprobs-mode (default: 'raw'), SGLang "
        "by SGLANG_RETURN_ORIGINAL_LOGPROB (default: 'processed').",
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
        if self.kind != "embedded" and self.url is None:
            raise ValueError(f"kind = {self.kind!r} and url is missing; set it to http://HOST:PORT")
        return self

"""What a server lists under ``/v1/models``."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.core.errors import ConfigError, EngineError
from tidegate.core.types import JsonObject
from tidegate.engines.remote.upstream import RefusedError, Upstream

_SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """``root`` is where vLLM loaded it from; ``parent`` the base that an adapter sits on, None for a base."""

    name: str
    root: str | None
    parent: str | None


async def listed_models(upstream: Upstream, *, timeout_s: float | None = None) -> dict[str, ListedModel]:
    """Models by name.

    Raises:
        EngineError: the server cannot be reached, or answers with something else.
    """
    try:
        answer = await upstream.get("/v1/models", timeout_s=timeout_s)
    except RefusedError as refused:
        raise refused.as_error() from refused
    data = answer.get("data")
    if not isinstance(data, list):
        raise EngineError(f"{upstream.url}/v1/models holds no list 'data'; is it a server with OpenAI's API?")
    models = [_model(one) for one in data if isinstance(one, dict) and isinstance(one.get("id"), str)]
    return {model.name: model for model in models}


def _model(fields: JsonObject) -> ListedModel:
    root, parent = fields.get("root"), fields.get("parent")
    return ListedModel(
        name=fields["id"],
        root=root if isinstance(root, str) else None,
        parent=parent if isinstance(parent, str) else None,
    )


async def only_model(upstream: Upstream) -> str:
    """Name of the one base model that the server lists.

    Raises:
        ConfigError: it lists none or several; ``engine.model`` must name one.
        EngineError: the server cannot be reached, or answers with something else.
    """
    bases = sorted(name for name, model in (await listed_models(upstream)).items() if model.parent is None)
    if len(bases) != 1:
        shown = ", ".join(map(repr, bases[:_SHOWN])) + (", ..." if len(bases) > _SHOWN else "")
        raise ConfigError(
            f"{upstream.url} lists {len(bases)} models ({shown}); name one with engine.model or --upstream-model"
        )
    return bases[0]

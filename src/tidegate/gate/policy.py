"""Reading a gate policy file: every field must be there, in range, and nothing else."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tidegate.core.errors import PolicyError
from tidegate.core.gate.policy import Policy
from tidegate.core.hashing import canonical_json

_POLICY = TypeAdapter(Policy)
_HINT = "policies/default.toml in the package tidegate.gate is a complete example"


def load_policy(file: Path | None = None) -> Policy:
    """Read a policy.

    Args:
        file: a TOML file; None reads the strict policy that ships with the package.

    Raises:
        PolicyError: the file is missing, not TOML, or a field is missing, unknown or out of range.
    """
    if file is None:
        shipped = resources.files("tidegate.gate") / "policies" / "default.toml"
        return parse_policy(shipped.read_text(encoding="utf-8"), source="policies/default.toml")
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise PolicyError(
            f"gate policy {str(file)!r} does not exist; name an existing file in the setting 'policy', or leave it "
            "out to use the strict policy that ships"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"gate policy {str(file)!r} cannot be read as UTF-8 text: {error}") from error
    return parse_policy(text, source=str(file))


def parse_policy(text: str, *, source: str) -> Policy:
    """Parse the TOML text of a policy; ``source`` names it in messages.

    Raises:
        PolicyError: as :func:`load_policy`.
    """
    try:
        values: dict[str, Any] = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise PolicyError(f"gate policy {source!r} is not TOML: {error}; {_HINT}") from error
    try:
        return _POLICY.validate_json(canonical_json(values))
    except ValidationError as error:
        problems = "; ".join(_sentences(error))
        raise PolicyError(f"gate policy {source!r} is not usable: {problems}; {_HINT}") from error
    except (TypeError, ValueError) as error:
        raise PolicyError(f"gate policy {source!r} holds a value that is no finite number or text: {error}") from error


def _sentences(error: ValidationError) -> list[str]:
    """One sentence a problem, with the field's name as the file has it."""
    sentences: list[str] = []
    for problem in error.errors():
        # A stage is "none" or a table of rules; of a table that is faulty only its own faults are of use, and of
        # anything else only that it is neither.
        alternative = str(problem["loc"][-1]) if problem["type"] in ("literal_error", "dataclass_type") else ""
        if isinstance(problem["input"], dict) and alternative.startswith("literal"):
            continue
        if not isinstance(problem["input"], dict) and alternative.endswith("Rules") and len(problem["loc"]) > 1:
            continue
        name = ".".join(str(part) for part in problem["loc"] if not str(part).endswith(("Rules", "]")))
        if problem["type"] == "missing":
            sentences.append(f"{name} is missing")
        else:
            sentences.append(f"{name} = {problem['input']!r}: {problem['msg']}")
    return sentences

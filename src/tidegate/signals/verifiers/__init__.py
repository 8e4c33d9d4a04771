"""Programs that score a finished transcript against a reference."""

from tidegate.ports import Verifier
from tidegate.signals.verifiers.exact_text import ExactText
from tidegate.signals.verifiers.gym import ReasoningGym
from tidegate.signals.verifiers.numeric_answer import NumericAnswer
from tidegate.signals.verifiers.tool_call import ToolCall

__all__ = ["ExactText", "NumericAnswer", "ReasoningGym", "ToolCall", "builtin_verifiers"]


def builtin_verifiers() -> dict[str, Verifier]:
    """All verifiers that ship, by name."""
    verifiers: tuple[Verifier, ...] = (ExactText(), NumericAnswer(), ReasoningGym(), ToolCall())
    return {verifier.name: verifier for verifier in verifiers}

"""What executes an agent's tool calls, at serving time by the client and again in the gate."""

from tidegate.ports import Environment
from tidegate.signals.environments.calculator import Calculator

__all__ = ["Calculator", "builtin_environments"]


def builtin_environments() -> dict[str, Environment]:
    """All environments that ship, by name."""
    environments: tuple[Environment, ...] = (Calculator(),)
    return {environment.name: environment for environment in environments}

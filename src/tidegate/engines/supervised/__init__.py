"""Servers that Tidegate starts, watches and ends, and the environments that they run in."""

from tidegate.engines.supervised.environments import RECIPES, Installed, Recipe, install, installed, recipe_for
from tidegate.engines.supervised.supervisor import Patience, ServerPlan, ServerState, SupervisedServer, supervised
from tidegate.engines.supervised.vllm_plan import VllmOptions, visible_gpus, vllm_plans

__all__ = [
    "RECIPES",
    "Installed",
    "Patience",
    "Recipe",
    "ServerPlan",
    "ServerState",
    "SupervisedServer",
    "VllmOptions",
    "install",
    "installed",
    "recipe_for",
    "supervised",
    "visible_gpus",
    "vllm_plans",
]

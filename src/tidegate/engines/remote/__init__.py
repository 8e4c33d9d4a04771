"""Engines that are servers outside this process, by URL: vLLM with adapters, any with OpenAI's API without."""

from tidegate.engines.remote.openai import OpenAIEngine
from tidegate.engines.remote.upstream import Upstream
from tidegate.engines.remote.vllm import VllmEngine

__all__ = ["OpenAIEngine", "Upstream", "VllmEngine"]

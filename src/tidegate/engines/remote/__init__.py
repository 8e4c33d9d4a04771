"""Engines that are servers outside this process, by URL: vLLM and SGLang, which take adapters, and any other."""

from tidegate.engines.remote.openai import OpenAIEngine
from tidegate.engines.remote.sglang import SglangEngine
from tidegate.engines.remote.upstream import Upstream
from tidegate.engines.remote.vllm import VllmEngine

__all__ = ["OpenAIEngine", "SglangEngine", "Upstream", "VllmEngine"]

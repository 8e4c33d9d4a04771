"""Simulated users: a client of the HTTP API like any other, through the official OpenAI package."""

from tidegate.simulate.player import FeedbackOptions, PlayOptions
from tidegate.simulate.results import CallRecord, EpisodeResult, Share, SimulationReport
from tidegate.simulate.simulation import ArrivalOptions, simulate

__all__ = [
    "ArrivalOptions",
    "CallRecord",
    "EpisodeResult",
    "FeedbackOptions",
    "PlayOptions",
    "Share",
    "SimulationReport",
    "simulate",
]

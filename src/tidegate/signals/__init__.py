"""Verdicts on what the agent did: verifiers, environments, tasks, and the scoring of recorded episodes."""

from tidegate.signals.environments import builtin_environments
from tidegate.signals.scoring import Scoring, judge_answer, score_episodes, verdict_key
from tidegate.signals.verifiers import builtin_verifiers

__all__ = ["Scoring", "builtin_environments", "builtin_verifiers", "judge_answer", "score_episodes", "verdict_key"]

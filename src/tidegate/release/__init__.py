"""Serving what was certified: routing, canaries, hot swap, rollback."""

from tidegate.release.loading import CertificateCheck
from tidegate.release.preconditions import BARE_BASE
from tidegate.release.publisher import PROBE_PROMPTS, Publisher
from tidegate.release.router import ANCHOR, CANARY, CHAMPION, PREVIOUS, Division, RoutedRelease, Router

__all__ = [
    "ANCHOR",
    "BARE_BASE",
    "CANARY",
    "CHAMPION",
    "PREVIOUS",
    "PROBE_PROMPTS",
    "CertificateCheck",
    "Division",
    "Publisher",
    "RoutedRelease",
    "Router",
]

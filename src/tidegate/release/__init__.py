"""Serving what was certified: routing, canaries, hot swap, rollback."""

from tidegate.release.loading import CertificateCheck
from tidegate.release.publisher import BARE_BASE, Publisher
from tidegate.release.router import ANCHOR, CANARY, CHAMPION, PREVIOUS, Division, RoutedRelease, Router

__all__ = [
    "ANCHOR",
    "BARE_BASE",
    "CANARY",
    "CHAMPION",
    "PREVIOUS",
    "CertificateCheck",
    "Division",
    "Publisher",
    "RoutedRelease",
    "Router",
]

"""Serving what was certified: routing, hot swap, rollback."""

from tidegate.release.publisher import BARE_BASE, CertificateCheck, Publisher
from tidegate.release.router import ANCHOR, CHAMPION, PREVIOUS, RoutedRelease, Router

__all__ = ["ANCHOR", "BARE_BASE", "CHAMPION", "PREVIOUS", "CertificateCheck", "Publisher", "RoutedRelease", "Router"]

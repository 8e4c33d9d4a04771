"""Serving what was certified: routing, hot swap, rollback."""

from tidegate.release.publisher import CertificateCheck, Publisher
from tidegate.release.router import ANCHOR, CHAMPION, PREVIOUS, RoutedRelease, Router

__all__ = ["ANCHOR", "CHAMPION", "PREVIOUS", "CertificateCheck", "Publisher", "RoutedRelease", "Router"]

"""From a finished answer to a committed record: group commit, routing by split, nothing acknowledged is lost."""

from tidegate.capture.recorder import Recorder
from tidegate.capture.routing import RecordStore

__all__ = ["RecordStore", "Recorder"]

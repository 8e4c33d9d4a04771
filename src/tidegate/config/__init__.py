"""Settings and their one source of defaults."""

from tidegate.config.settings import Settings, load_settings

__all__ = ["Settings", "load_settings"]

"""Runs the Alembic revisions that ship inside the package.

Alembic is imported only when there is something to migrate: most commands open a database that is current.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy as sa

if TYPE_CHECKING:
    from alembic.config import Config

_MIGRATIONS = Path(__file__).parent / "migrations"
_ALEMBIC_IS_GLOBAL = threading.Lock()  # its ``context`` is one per process


def upgrade(connection: sa.Connection) -> None:
    """Bring the schema to the newest revision, inside the transaction of ``connection``."""
    from alembic import command  # noqa: PLC0415

    config = _config()
    config.attributes["connection"] = connection
    with _ALEMBIC_IS_GLOBAL:
        command.upgrade(config, "head")


def known_revisions() -> tuple[str, ...]:
    """All revisions, newest first."""
    from alembic.script import ScriptDirectory  # noqa: PLC0415

    return tuple(script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions())


def _config() -> Config:
    from alembic.config import Config  # noqa: PLC0415

    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config

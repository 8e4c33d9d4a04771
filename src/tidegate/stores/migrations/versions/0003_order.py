"""Cycles and their steps know in which order they were written; SQLite's hidden ``rowid`` said so before.

Revision ID: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; no PostgreSQL database is so old that it holds rows here."""
    for table in ("cycles", "cycle_steps"):
        op.add_column(table, sa.Column("position", sa.Integer(), server_default=sa.text("0"), nullable=False))
        if op.get_bind().dialect.name == "sqlite":
            op.execute(sa.update(sa.table(table, sa.column("position"))).values(position=sa.literal_column("rowid")))


def downgrade() -> None:
    """Refused: the older version orders by ``rowid``, which only SQLite has.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError("revision 0003 can't be taken back; restore a backup instead of going below it")

"""Answers of releases in the shadow have a table of their own.

Revision ID: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from tidegate.stores.types import TEXT

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "shadow_answers",
        sa.Column("shadow_id", TEXT, nullable=False),
        sa.Column("interaction_id", TEXT, nullable=False),
        sa.Column("release_id", TEXT, nullable=False),
        sa.Column("engine_replica", TEXT, nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("outcome", TEXT, nullable=False),
        sa.Column("reason", TEXT, nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("answer", TEXT, nullable=True),
        sa.Column("prompt_tokens", sa.Integer(), nullable=True),
        sa.Column("completion_tokens", sa.Integer(), nullable=True),
        sa.CheckConstraint("(outcome = 'answered') = (answer IS NOT NULL)", name=op.f("ck_shadow_answers_answered")),
        sa.ForeignKeyConstraint(["interaction_id"], ["interactions.id"], name=op.f("fk_shadow_answers_interaction_id")),
        sa.PrimaryKeyConstraint("shadow_id", "interaction_id", name=op.f("pk_shadow_answers")),
    )
    op.create_index("ix_shadow_answers_shadow_id_created_at", "shadow_answers", ["shadow_id", "created_at"])


def downgrade() -> None:
    """Refused: it would drop what was recorded.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError("revision 0004 can't be taken back; restore a backup instead of going below it")

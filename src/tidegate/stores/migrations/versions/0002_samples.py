"""Answers of the gate hold their text, and a task may be answered several times.

Answers that were kept before say nothing about refusals, text or log-probabilities. They are dropped: the gate asks
again for what it misses.

Revision ID: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from tidegate.stores.types import TEXT

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the table of answers anew."""
    op.drop_table("answers")
    op.create_table(
        "answers",
        sa.Column("epoch_id", TEXT, nullable=False),
        sa.Column("adapter_sha256", TEXT, nullable=False),
        sa.Column("task_id", TEXT, nullable=False),
        sa.Column("sample", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("seed", TEXT, nullable=False),
        sa.Column("passed", sa.Boolean(), nullable=False),
        sa.Column("score", sa.Float(), nullable=False),
        sa.Column("no_reply", sa.Boolean(), nullable=False),
        sa.Column("invalid_tool_call", sa.Boolean(), nullable=False),
        sa.Column("refused", sa.Boolean(), nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("text", TEXT, nullable=False),
        sa.Column("tools", TEXT, nullable=False),
        sa.Column("surprisal", sa.Float(), nullable=True),
        sa.Column("error", TEXT, nullable=True),
        sa.ForeignKeyConstraint(
            ["epoch_id", "task_id"], ["epoch_tasks.epoch_id", "epoch_tasks.task_id"], name="fk_answers_epoch_id_task_id"
        ),
        sa.PrimaryKeyConstraint("epoch_id", "adapter_sha256", "task_id", "sample", name="pk_answers"),
    )


def downgrade() -> None:
    """Refused: the older table has no room for several answers to a task.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError("revision 0002 can't be taken back; restore a backup instead of going below it")

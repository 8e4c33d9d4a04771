"""The first schema: every noun a table, the audit log append-only by triggers.

Revision ID: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from tidegate.stores.types import TEXT

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_WAITS = sa.text("state = 'unmatched'")

# One trigger each for what SQL could do to a log. SQLite's insert trigger also stops INSERT OR REPLACE, which deletes
# without firing the delete trigger, and in both any record that does not continue the chain.
_SQLITE_TRIGGERS = (
    """
    CREATE TRIGGER audit_records_no_update BEFORE UPDATE ON audit_records
    BEGIN SELECT RAISE(ABORT, 'audit_records is append-only: UPDATE is refused'); END
    """,
    """
    CREATE TRIGGER audit_records_no_delete BEFORE DELETE ON audit_records
    BEGIN SELECT RAISE(ABORT, 'audit_records is append-only: DELETE is refused'); END
    """,
    """
    CREATE TRIGGER audit_records_one_chain BEFORE INSERT ON audit_records
    WHEN NEW.seq <> (SELECT COALESCE(MAX(seq), 0) + 1 FROM audit_records)
      OR NEW.prev_hash <> COALESCE((SELECT hash FROM audit_records ORDER BY seq DESC LIMIT 1), printf('%064d', 0))
    BEGIN SELECT RAISE(ABORT, 'audit_records is one chain: the record does not follow the last one'); END
    """,
)
# The table that fired the trigger is asked, whatever search_path the session that inserts has chosen.
_POSTGRES_TRIGGERS = (
    """
    CREATE FUNCTION audit_records_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
      RAISE EXCEPTION 'audit_records is append-only: % is refused', TG_OP;
    END $$
    """,
    """
    CREATE FUNCTION audit_records_follow() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE
      last_seq integer;
      last_hash text;
    BEGIN
      EXECUTE format('SELECT seq, hash FROM %I.%I ORDER BY seq DESC LIMIT 1', TG_TABLE_SCHEMA, TG_TABLE_NAME)
        INTO last_seq, last_hash;
      IF NEW.seq <> COALESCE(last_seq, 0) + 1 OR NEW.prev_hash <> COALESCE(last_hash, repeat('0', 64)) THEN
        RAISE EXCEPTION 'audit_records is one chain: the record does not follow the last one';
      END IF;
      RETURN NEW;
    END $$
    """,
    """
    CREATE TRIGGER audit_records_no_change BEFORE UPDATE OR DELETE ON audit_records
    FOR EACH ROW EXECUTE FUNCTION audit_records_refuse()
    """,
    """
    CREATE TRIGGER audit_records_no_truncate BEFORE TRUNCATE ON audit_records
    FOR EACH STATEMENT EXECUTE FUNCTION audit_records_refuse()
    """,
    """
    CREATE TRIGGER audit_records_one_chain BEFORE INSERT ON audit_records
    FOR EACH ROW EXECUTE FUNCTION audit_records_follow()
    """,
)


def upgrade() -> None:
    """Create all tables."""
    op.create_table(
        "audit_records",
        sa.Column("seq", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("prev_hash", TEXT, nullable=False),
        sa.Column("time", sa.Float(), nullable=False),
        sa.Column("kind", TEXT, nullable=False),
        sa.Column("body", TEXT, nullable=False),
        sa.Column("hash", TEXT, nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_audit_records"),
    )
    op.create_table(
        "batch_manifests",
        sa.Column("hash", TEXT, nullable=False),
        sa.Column("body", TEXT, nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("hash", name="pk_batch_manifests"),
    )
    op.create_table(
        "candidates",
        sa.Column("id", TEXT, nullable=False),
        sa.Column("adapter_sha256", TEXT, nullable=False),
        sa.Column("base_sha256", TEXT, nullable=False),
        sa.Column("manifest_hash", TEXT, nullable=True),
        sa.Column("parent_sha256", TEXT, nullable=True),
        sa.Column("state", TEXT, nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("origin", TEXT, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_candidates"),
    )
    op.create_table(
        "cycles",
        sa.Column("id", TEXT, nullable=False),
        sa.Column("config", TEXT, nullable=False),
        sa.Column("opened_at", sa.Float(), nullable=False),
        sa.Column("closed_at", sa.Float(), nullable=True),
        sa.Column("outcome", TEXT, nullable=True),
        sa.Column("open_slot", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_cycles"),
        sa.UniqueConstraint("open_slot", name="uq_cycles_open_slot"),
    )
    op.create_table(
        "episodes",
        sa.Column("id", TEXT, nullable=False),
        sa.Column("user_key", TEXT, nullable=False),
        sa.Column("split", TEXT, nullable=False),
        sa.Column("first_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_episodes"),
    )
    op.create_index("ix_episodes_split_first_at", "episodes", ["split", "first_at"], unique=False)
    op.create_table(
        "epochs",
        sa.Column("id", TEXT, nullable=False),
        sa.Column("commitment", TEXT, nullable=False),
        sa.Column("opened_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_epochs"),
    )
    op.create_table(
        "feedback",
        sa.Column("id", TEXT, nullable=False),
        sa.Column("metric_name", TEXT, nullable=False),
        sa.Column("value", TEXT, nullable=False),
        sa.Column("interaction_id", TEXT, nullable=True),
        sa.Column("episode_id", TEXT, nullable=True),
        sa.Column("tags", TEXT, nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("state", TEXT, nullable=False),
        sa.CheckConstraint("(interaction_id IS NULL) <> (episode_id IS NULL)", name=op.f("ck_feedback_names_one")),
        sa.PrimaryKeyConstraint("id", name="pk_feedback"),
    )
    for name in ("interaction", "episode"):
        op.create_index(
            f"ix_feedback_waiting_{name}", "feedback", [f"{name}_id"], sqlite_where=_WAITS, postgresql_where=_WAITS
        )
    op.create_table(
        "releases",
        sa.Column("id", TEXT, nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("adapter_sha256", TEXT, nullable=True),
        sa.Column("base_sha256", TEXT, nullable=False),
        sa.Column("certificate", TEXT, nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("restores", TEXT, nullable=True),
        sa.ForeignKeyConstraint(["restores"], ["releases.id"], name="fk_releases_restores"),
        sa.PrimaryKeyConstraint("id", name="pk_releases"),
        sa.UniqueConstraint("number", name="uq_releases_number"),
    )
    op.create_table(
        "store_meta",
        sa.Column("key", TEXT, nullable=False),
        sa.Column("value", TEXT, nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_store_meta"),
    )
    op.create_table(
        "aliases",
        sa.Column("name", TEXT, nullable=False),
        sa.Column("release_id", TEXT, nullable=False),
        sa.ForeignKeyConstraint(["release_id"], ["releases.id"], name="fk_aliases_release_id"),
        sa.PrimaryKeyConstraint("name", name="pk_aliases"),
    )
    op.create_table(
        "cycle_steps",
        sa.Column("cycle_id", TEXT, nullable=False),
        sa.Column("step", TEXT, nullable=False),
        sa.Column("output", TEXT, nullable=False),
        sa.Column("finished_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["cycle_id"], ["cycles.id"], name="fk_cycle_steps_cycle_id"),
        sa.PrimaryKeyConstraint("cycle_id", "step", name="pk_cycle_steps"),
    )
    op.create_table(
        "decisions",
        sa.Column("seq", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("outcome", TEXT, nullable=True),
        sa.Column("candidate_id", TEXT, nullable=True),
        sa.Column("epoch_id", TEXT, nullable=True),
        sa.ForeignKeyConstraint(["seq"], ["audit_records.seq"], name="fk_decisions_seq"),
        sa.PrimaryKeyConstraint("seq", name="pk_decisions"),
    )
    op.create_table(
        "epoch_tasks",
        sa.Column("epoch_id", TEXT, nullable=False),
        sa.Column("task_id", TEXT, nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("task", TEXT, nullable=False),
        sa.ForeignKeyConstraint(["epoch_id"], ["epochs.id"], name="fk_epoch_tasks_epoch_id"),
        sa.PrimaryKeyConstraint("epoch_id", "task_id", name="pk_epoch_tasks"),
    )
    op.create_index("ix_epoch_tasks_task_id", "epoch_tasks", ["task_id"], unique=False)
    op.create_table(
        "interactions",
        sa.Column("id", TEXT, nullable=False),
        sa.Column("episode_id", TEXT, nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("messages", TEXT, nullable=False),
        sa.Column("tools", TEXT, nullable=False),
        sa.Column("sampling", TEXT, nullable=False),
        sa.Column("prompt_tokens", sa.LargeBinary(), nullable=False),
        sa.Column("choices", TEXT, nullable=False),
        sa.Column("choice_tokens", sa.LargeBinary(), nullable=False),
        sa.Column("choice_logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("release_id", TEXT, nullable=False),
        sa.Column("engine_replica", TEXT, nullable=False),
        sa.Column("latency_s", sa.Float(), nullable=False),
        sa.Column("main_line", sa.Boolean(), nullable=False),
        sa.Column("consent", sa.Boolean(), nullable=False),
        sa.Column("task", TEXT, nullable=True),
        sa.ForeignKeyConstraint(["episode_id"], ["episodes.id"], name="fk_interactions_episode_id"),
        sa.PrimaryKeyConstraint("id", name="pk_interactions"),
    )
    op.create_index("ix_interactions_episode_id_created_at", "interactions", ["episode_id", "created_at"], unique=False)
    op.create_table(
        "verdicts",
        sa.Column("episode_id", TEXT, nullable=False),
        sa.Column("verifier", TEXT, nullable=False),
        sa.Column("version", TEXT, nullable=False),
        sa.Column("outcome", TEXT, nullable=False),
        sa.Column("score", sa.Float(), nullable=False),
        sa.Column("detail", TEXT, nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["episode_id"], ["episodes.id"], name="fk_verdicts_episode_id"),
        sa.PrimaryKeyConstraint("episode_id", "verifier", "version", name="pk_verdicts"),
    )
    op.create_table(
        "answers",
        sa.Column("epoch_id", TEXT, nullable=False),
        sa.Column("adapter_sha256", TEXT, nullable=False),
        sa.Column("task_id", TEXT, nullable=False),
        sa.Column("seed", TEXT, nullable=False),
        sa.Column("passed", sa.Boolean(), nullable=False),
        sa.Column("score", sa.Float(), nullable=False),
        sa.Column("no_reply", sa.Boolean(), nullable=False),
        sa.Column("invalid_tool_call", sa.Boolean(), nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("error", TEXT, nullable=True),
        sa.ForeignKeyConstraint(
            ["epoch_id", "task_id"], ["epoch_tasks.epoch_id", "epoch_tasks.task_id"], name="fk_answers_epoch_id_task_id"
        ),
        sa.PrimaryKeyConstraint("epoch_id", "adapter_sha256", "task_id", name="pk_answers"),
    )
    op.create_table(
        "rewards",
        sa.Column("interaction_id", TEXT, nullable=False),
        sa.Column("verifier", TEXT, nullable=False),
        sa.Column("version", TEXT, nullable=False),
        sa.Column("policy", TEXT, nullable=False),
        sa.Column("episode_id", TEXT, nullable=False),
        sa.Column("value", sa.Float(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["episode_id"], ["episodes.id"], name="fk_rewards_episode_id"),
        sa.ForeignKeyConstraint(["interaction_id"], ["interactions.id"], name="fk_rewards_interaction_id"),
        sa.PrimaryKeyConstraint("interaction_id", "verifier", "version", "policy", name="pk_rewards"),
    )
    triggers = _POSTGRES_TRIGGERS if op.get_bind().dialect.name == "postgresql" else _SQLITE_TRIGGERS
    for trigger in triggers:
        op.execute(sa.DDL(trigger.replace("%", "%%")))


def downgrade() -> None:
    """Refused: dropping the tables would lose every record.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError("revision 0001 is the first; restore a backup instead of going below it")

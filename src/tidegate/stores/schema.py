"""The tables as they are now. How a database gets there is the business of :mod:`tidegate.stores.migrations`.

Times are Unix seconds. JSON is text, arrays are bytes of :mod:`tidegate.stores.packing`. There is no table of
trajectories: the recorded run of an episode is its interactions in order of time.
"""

from __future__ import annotations

from sqlalchemy import (
    Boolean,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    UniqueConstraint,
    text,
)

from tidegate.stores.types import TEXT

REVISION = "0004"
"""The newest revision in ``migrations/versions``: a database of this revision has exactly these tables."""

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(column_0_N_label)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

store_meta = Table(
    "store_meta",
    metadata,
    Column("key", TEXT, primary_key=True),
    Column("value", TEXT, nullable=False),
)

episodes = Table(
    "episodes",
    metadata,
    Column("id", TEXT, primary_key=True),
    Column("user_key", TEXT, nullable=False),
    Column("split", TEXT, nullable=False),
    Column("first_at", Float, nullable=False),
    Index("ix_episodes_split_first_at", "split", "first_at"),
)

interactions = Table(
    "interactions",
    metadata,
    Column("id", TEXT, primary_key=True),
    Column("episode_id", TEXT, ForeignKey("episodes.id"), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("messages", TEXT, nullable=False),
    Column("tools", TEXT, nullable=False),
    Column("sampling", TEXT, nullable=False),
    Column("prompt_tokens", LargeBinary, nullable=False),
    Column("choices", TEXT, nullable=False),
    Column("choice_tokens", LargeBinary, nullable=False),
    Column("choice_logprobs", LargeBinary, nullable=False),
    Column("release_id", TEXT, nullable=False),
    Column("engine_replica", TEXT, nullable=False),
    Column("latency_s", Float, nullable=False),
    Column("main_line", Boolean, nullable=False),
    Column("consent", Boolean, nullable=False),
    Column("task", TEXT),
    Index("ix_interactions_episode_id_created_at", "episode_id", "created_at"),
)

verdicts = Table(
    "verdicts",
    metadata,
    Column("episode_id", TEXT, ForeignKey("episodes.id"), primary_key=True),
    Column("verifier", TEXT, primary_key=True),
    Column("version", TEXT, primary_key=True),
    Column("outcome", TEXT, nullable=False),
    Column("score", Float, nullable=False),
    Column("detail", TEXT, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("created_at", Float, nullable=False),
)

rewards = Table(
    "rewards",
    metadata,
    Column("interaction_id", TEXT, ForeignKey("interactions.id"), primary_key=True),
    Column("verifier", TEXT, primary_key=True),
    Column("version", TEXT, primary_key=True),
    Column("policy", TEXT, primary_key=True),
    Column("episode_id", TEXT, ForeignKey("episodes.id"), nullable=False),
    Column("value", Float, nullable=False),
    Column("created_at", Float, nullable=False),
)

_WAITS = text("state = 'unmatched'")

# No foreign keys: feedback may arrive before the record of what it names.
feedback = Table(
    "feedback",
    metadata,
    Column("id", TEXT, primary_key=True),
    Column("metric_name", TEXT, nullable=False),
    Column("value", TEXT, nullable=False),
    Column("interaction_id", TEXT),
    Column("episode_id", TEXT),
    Column("tags", TEXT, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("state", TEXT, nullable=False),
    CheckConstraint("(interaction_id IS NULL) <> (episode_id IS NULL)", name="names_one"),
    # Few rows wait at a time: recording looks for them in every batch, so the look-up must not grow with the table.
    Index("ix_feedback_waiting_interaction", "interaction_id", sqlite_where=_WAITS, postgresql_where=_WAITS),
    Index("ix_feedback_waiting_episode", "episode_id", sqlite_where=_WAITS, postgresql_where=_WAITS),
)

# A table of their own: no query over interactions can take an answer that nobody got for one that somebody did.
shadow_answers = Table(
    "shadow_answers",
    metadata,
    Column("shadow_id", TEXT, primary_key=True),
    Column("interaction_id", TEXT, ForeignKey("interactions.id"), primary_key=True),
    Column("release_id", TEXT, nullable=False),
    Column("engine_replica", TEXT, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("outcome", TEXT, nullable=False),
    Column("reason", TEXT, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("answer", TEXT),
    Column("prompt_tokens", Integer),
    Column("completion_tokens", Integer),
    CheckConstraint("(outcome = 'answered') = (answer IS NOT NULL)", name="answered"),
    Index("ix_shadow_answers_shadow_id_created_at", "shadow_id", "created_at"),
)

batch_manifests = Table(
    "batch_manifests",
    metadata,
    Column("hash", TEXT, primary_key=True),
    Column("body", TEXT, nullable=False),
    Column("created_at", Float, nullable=False),
)

candidates = Table(
    "candidates",
    metadata,
    Column("id", TEXT, primary_key=True),
    Column("adapter_sha256", TEXT, nullable=False),
    Column("base_sha256", TEXT, nullable=False),
    Column("manifest_hash", TEXT),
    Column("parent_sha256", TEXT),
    Column("state", TEXT, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("origin", TEXT, nullable=False),
)

releases = Table(
    "releases",
    metadata,
    Column("id", TEXT, primary_key=True),
    Column("number", Integer, nullable=False),
    Column("adapter_sha256", TEXT),
    Column("base_sha256", TEXT, nullable=False),
    Column("certificate", TEXT),
    Column("created_at", Float, nullable=False),
    Column("restores", TEXT, ForeignKey("releases.id")),
    UniqueConstraint("number"),
)

aliases = Table(
    "aliases",
    metadata,
    Column("name", TEXT, primary_key=True),
    Column("release_id", TEXT, ForeignKey("releases.id"), nullable=False),
)

# Append-only by triggers, see the migration.
audit_records = Table(
    "audit_records",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("prev_hash", TEXT, nullable=False),
    Column("time", Float, nullable=False),
    Column("kind", TEXT, nullable=False),
    Column("body", TEXT, nullable=False),
    Column("hash", TEXT, nullable=False),
)

decisions = Table(
    "decisions",
    metadata,
    Column("seq", Integer, ForeignKey("audit_records.seq"), primary_key=True, autoincrement=False),
    Column("outcome", TEXT),
    Column("candidate_id", TEXT),
    Column("epoch_id", TEXT),
)

cycles = Table(
    "cycles",
    metadata,
    Column("id", TEXT, primary_key=True),
    Column("config", TEXT, nullable=False),
    Column("opened_at", Float, nullable=False),
    Column("closed_at", Float),
    Column("outcome", TEXT),
    Column("open_slot", Integer),  # 1 while open, else NULL: unique, so at most one cycle is open
    Column("position", Integer, nullable=False, server_default=text("0")),  # order of insertion
    UniqueConstraint("open_slot"),
)

cycle_steps = Table(
    "cycle_steps",
    metadata,
    Column("cycle_id", TEXT, ForeignKey("cycles.id"), primary_key=True),
    Column("step", TEXT, primary_key=True),
    Column("output", TEXT, nullable=False),
    Column("finished_at", Float, nullable=False),
    Column("position", Integer, nullable=False, server_default=text("0")),  # order of insertion
)

epochs = Table(
    "epochs",
    metadata,
    Column("id", TEXT, primary_key=True),
    Column("commitment", TEXT, nullable=False),
    Column("opened_at", Float, nullable=False),
)

epoch_tasks = Table(
    "epoch_tasks",
    metadata,
    Column("epoch_id", TEXT, ForeignKey("epochs.id"), primary_key=True),
    Column("task_id", TEXT, primary_key=True),
    Column("position", Integer, nullable=False),
    Column("task", TEXT, nullable=False),
    Index("ix_epoch_tasks_task_id", "task_id"),
)

answers = Table(
    "answers",
    metadata,
    Column("epoch_id", TEXT, primary_key=True),
    Column("adapter_sha256", TEXT, primary_key=True),
    Column("task_id", TEXT, primary_key=True),
    Column("sample", Integer, primary_key=True, autoincrement=False),
    Column("seed", TEXT, nullable=False),  # text: a seed may be any integer, a column holds 64 bits
    Column("passed", Boolean, nullable=False),
    Column("score", Float, nullable=False),
    Column("no_reply", Boolean, nullable=False),
    Column("invalid_tool_call", Boolean, nullable=False),
    Column("refused", Boolean, nullable=False),
    Column("tokens", Integer, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("text", TEXT, nullable=False),
    Column("tools", TEXT, nullable=False),
    Column("surprisal", Float),
    Column("error", TEXT),
    ForeignKeyConstraint(["epoch_id", "task_id"], ["epoch_tasks.epoch_id", "epoch_tasks.task_id"]),
)

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
    Text,
    UniqueConstraint,
    text,
)

REVISION = "0002"
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
    Column("key", Text, primary_key=True),
    Column("value", Text, nullable=False),
)

episodes = Table(
    "episodes",
    metadata,
    Column("id", Text, primary_key=True),
    Column("user_key", Text, nullable=False),
    Column("split", Text, nullable=False),
    Column("first_at", Float, nullable=False),
    Index("ix_episodes_split_first_at", "split", "first_at"),
)

interactions = Table(
    "interactions",
    metadata,
    Column("id", Text, primary_key=True),
    Column("episode_id", Text, ForeignKey("episodes.id"), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("messages", Text, nullable=False),
    Column("tools", Text, nullable=False),
    Column("sampling", Text, nullable=False),
    Column("prompt_tokens", LargeBinary, nullable=False),
    Column("choices", Text, nullable=False),
    Column("choice_tokens", LargeBinary, nullable=False),
    Column("choice_logprobs", LargeBinary, nullable=False),
    Column("release_id", Text, nullable=False),
    Column("engine_replica", Text, nullable=False),
    Column("latency_s", Float, nullable=False),
    Column("main_line", Boolean, nullable=False),
    Column("consent", Boolean, nullable=False),
    Column("task", Text),
    Index("ix_interactions_episode_id_created_at", "episode_id", "created_at"),
)

verdicts = Table(
    "verdicts",
    metadata,
    Column("episode_id", Text, ForeignKey("episodes.id"), primary_key=True),
    Column("verifier", Text, primary_key=True),
    Column("version", Text, primary_key=True),
    Column("outcome", Text, nullable=False),
    Column("score", Float, nullable=False),
    Column("detail", Text, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("created_at", Float, nullable=False),
)

rewards = Table(
    "rewards",
    metadata,
    Column("interaction_id", Text, ForeignKey("interactions.id"), primary_key=True),
    Column("verifier", Text, primary_key=True),
    Column("version", Text, primary_key=True),
    Column("policy", Text, primary_key=True),
    Column("episode_id", Text, ForeignKey("episodes.id"), nullable=False),
    Column("value", Float, nullable=False),
    Column("created_at", Float, nullable=False),
)

# No foreign keys: feedback may arrive before the record of what it names.
feedback = Table(
    "feedback",
    metadata,
    Column("id", Text, primary_key=True),
    Column("metric_name", Text, nullable=False),
    Column("value", Text, nullable=False),
    Column("interaction_id", Text),
    Column("episode_id", Text),
    Column("tags", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("state", Text, nullable=False),
    CheckConstraint("(interaction_id IS NULL) <> (episode_id IS NULL)", name="names_one"),
    # Few rows wait at a time: recording looks for them in every batch, so the look-up must not grow with the table.
    Index("ix_feedback_waiting_interaction", "interaction_id", sqlite_where=text("state = 'unmatched'")),
    Index("ix_feedback_waiting_episode", "episode_id", sqlite_where=text("state = 'unmatched'")),
)

batch_manifests = Table(
    "batch_manifests",
    metadata,
    Column("hash", Text, primary_key=True),
    Column("body", Text, nullable=False),
    Column("created_at", Float, nullable=False),
)

candidates = Table(
    "candidates",
    metadata,
    Column("id", Text, primary_key=True),
    Column("adapter_sha256", Text, nullable=False),
    Column("base_sha256", Text, nullable=False),
    Column("manifest_hash", Text),
    Column("parent_sha256", Text),
    Column("state", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("origin", Text, nullable=False),
)

releases = Table(
    "releases",
    metadata,
    Column("id", Text, primary_key=True),
    Column("number", Integer, nullable=False),
    Column("adapter_sha256", Text),
    Column("base_sha256", Text, nullable=False),
    Column("certificate", Text),
    Column("created_at", Float, nullable=False),
    Column("restores", Text, ForeignKey("releases.id")),
    UniqueConstraint("number"),
)

aliases = Table(
    "aliases",
    metadata,
    Column("name", Text, primary_key=True),
    Column("release_id", Text, ForeignKey("releases.id"), nullable=False),
)

# Append-only by triggers, see the migration.
audit_records = Table(
    "audit_records",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("prev_hash", Text, nullable=False),
    Column("time", Float, nullable=False),
    Column("kind", Text, nullable=False),
    Column("body", Text, nullable=False),
    Column("hash", Text, nullable=False),
)

decisions = Table(
    "decisions",
    metadata,
    Column("seq", Integer, ForeignKey("audit_records.seq"), primary_key=True, autoincrement=False),
    Column("outcome", Text),
    Column("candidate_id", Text),
    Column("epoch_id", Text),
)

cycles = Table(
    "cycles",
    metadata,
    Column("id", Text, primary_key=True),
    Column("config", Text, nullable=False),
    Column("opened_at", Float, nullable=False),
    Column("closed_at", Float),
    Column("outcome", Text),
    Column("open_slot", Integer),  # 1 while open, else NULL: unique, so at most one cycle is open
    UniqueConstraint("open_slot"),
)

cycle_steps = Table(
    "cycle_steps",
    metadata,
    Column("cycle_id", Text, ForeignKey("cycles.id"), primary_key=True),
    Column("step", Text, primary_key=True),
    Column("output", Text, nullable=False),
    Column("finished_at", Float, nullable=False),
)

epochs = Table(
    "epochs",
    metadata,
    Column("id", Text, primary_key=True),
    Column("commitment", Text, nullable=False),
    Column("opened_at", Float, nullable=False),
)

epoch_tasks = Table(
    "epoch_tasks",
    metadata,
    Column("epoch_id", Text, ForeignKey("epochs.id"), primary_key=True),
    Column("task_id", Text, primary_key=True),
    Column("position", Integer, nullable=False),
    Column("task", Text, nullable=False),
    Index("ix_epoch_tasks_task_id", "task_id"),
)

answers = Table(
    "answers",
    metadata,
    Column("epoch_id", Text, primary_key=True),
    Column("adapter_sha256", Text, primary_key=True),
    Column("task_id", Text, primary_key=True),
    Column("sample", Integer, primary_key=True, autoincrement=False),
    Column("seed", Text, nullable=False),  # text: a seed may be any integer, a column holds 64 bits
    Column("passed", Boolean, nullable=False),
    Column("score", Float, nullable=False),
    Column("no_reply", Boolean, nullable=False),
    Column("invalid_tool_call", Boolean, nullable=False),
    Column("refused", Boolean, nullable=False),
    Column("tokens", Integer, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("text", Text, nullable=False),
    Column("tools", Text, nullable=False),
    Column("surprisal", Float),
    Column("error", Text),
    ForeignKeyConstraint(["epoch_id", "task_id"], ["epoch_tasks.epoch_id", "epoch_tasks.task_id"]),
)

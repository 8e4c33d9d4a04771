"""What Alembic runs: the revisions, on the connection and inside the transaction that the store gives it."""

from __future__ import annotations

from alembic import context

from tidegate.stores.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()

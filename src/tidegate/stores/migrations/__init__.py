"""Alembic revisions. A released revision never changes; a new table or column is a new revision.

``alembic revision`` is not needed: copy the newest file in ``versions/``, and let
``tests/unit/test_store_migrations.py`` say whether it and ``stores/schema.py`` agree.
"""

"""Column types that mean the same in every database."""

from __future__ import annotations

import sqlalchemy as sa

TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
"""Text that is ordered by its code points everywhere: what a list begins with must not depend on a locale."""

"""What the commands of people do beside a running server, which acts by itself."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from store_samples import release
from tidegate.app import oversight
from tidegate.app.layout import DataDirectory
from tidegate.app.stores import Stores, open_stores
from tidegate.config import Settings
from tidegate.core.errors import ConflictError, VoidCertificateError
from tidegate.release import ANCHOR, CHAMPION


@pytest.mark.parametrize("watch_was_first", [True, False])
async def test_an_anchor_that_the_watch_restored_already_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watch_was_first: bool
) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    directory = DataDirectory(root=settings.data_dir).create()
    base, bad = release(0), release(1)
    again = release(2, adapter_sha256=None, restores=base.id)
    with open_stores(directory) as stores:
        for one in (base, bad):
            stores.releases.add_release(one)
        stores.releases.move_aliases({CHAMPION: bad.id, ANCHOR: base.id}, reason="test", time=1.0)

    def void(*_: object) -> Any:
        def check(certificate: object, **__: object) -> None:
            raise VoidCertificateError("its verifier was invalidated")

        return check

    class Beaten:
        def __init__(self, stores: Stores) -> None:
            self.stores = stores

        async def rollback(self, to: str | None, reason: str) -> Any:
            if watch_was_first:
                self.stores.releases.add_release(again)
                self.stores.releases.move_aliases({CHAMPION: again.id}, reason="watch", time=2.0)
            raise ConflictError(f"{to} holds the same content; {reason}")

    @asynccontextmanager
    async def publishing(_: object, __: object, stores: Stores) -> AsyncGenerator[Beaten]:
        yield Beaten(stores)

    monkeypatch.setattr(oversight, "certificate_check", void)
    monkeypatch.setattr(oversight, "publishing", publishing)
    if watch_was_first:
        assert await oversight._restore_anchor(settings) == {"restored": again.id}
    else:
        with pytest.raises(ConflictError, match="same content"):
            await oversight._restore_anchor(settings)

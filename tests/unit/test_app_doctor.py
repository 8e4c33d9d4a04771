"""What the doctor says of a data directory that little was done with yet."""

from __future__ import annotations

from pathlib import Path

from tidegate.app.doctor import Finding, examine
from tidegate.app.layout import DataDirectory
from tidegate.app.splits import user_splitter
from tidegate.app.stores import open_stores
from tidegate.config import Settings


def keys_of(settings: Settings) -> Finding:
    return next(finding for finding in examine(settings) if finding.check == "keys")


def test_keys_that_nothing_needed_yet_are_not_missing_and_are_not_made(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    directory = DataDirectory.of(settings).create()
    user_splitter(settings, directory)
    with open_stores(directory):
        pass
    found = keys_of(settings)
    assert (found.state, found.detail) == ("ok", "gate.pem, operator.pem not made yet: nothing has been signed")
    assert not directory.gate_key.exists()
    directory.split_key_file.unlink()
    found = keys_of(settings)
    assert found.state == "wrong"
    assert "'split.key'] missing" in found.detail

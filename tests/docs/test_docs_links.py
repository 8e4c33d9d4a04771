"""Links between pages lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from repository import ROOT, pages, prose

_LINK = re.compile(r"(?<!\\)\[[^\]]*\]\((?P<target>[^)\s]+)(?:\s+\"[^\"]*\")?\)")


def anchors(page: Path) -> set[str]:
    """GitHub's and MyST's names of a page's headings."""
    headings = re.findall(r"^#{1,6} (.+)$", prose(page), re.MULTILINE)
    texts = [re.sub(r"[^\w\- ]", "", heading.strip().lower()) for heading in headings]
    return {text.replace(" ", "-") for text in texts}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_resolve(page: Path) -> None:
    for found in _LINK.finditer(prose(page)):
        target = found["target"]
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} links to {target!r}, which is not there"
        assert file.is_relative_to(ROOT), f"{page.name} links to {target!r}, outside the repository"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name} links to {target!r}; there is no such heading"


def test_every_page_of_docs_can_be_reached_from_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^([\w/-]+)$", index, re.MULTILINE))
    toctrees = {"decisions/README": r"^(\d{4}-[\w-]+)$"}
    for parent, pattern in toctrees.items():
        text = (ROOT / "docs" / f"{parent}.md").read_text(encoding="utf-8")
        folder = parent.rpartition("/")[0]
        listed |= {f"{folder}/{name}" for name in re.findall(pattern, text, re.MULTILINE)}
    docs = ROOT / "docs"
    there = {page.relative_to(docs).with_suffix("").as_posix() for page in pages() if page.is_relative_to(docs)}
    decisions = {name for name in there if name.startswith("decisions/") and name != "decisions/README"}
    assert there - decisions - {"index"} <= listed

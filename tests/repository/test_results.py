"""Every result in benchmarks/results/ is quoted by a document, and every one that a document names is there."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import PAGES, ROOT

RESULTS = ROOT / "benchmarks" / "results"
pytestmark = pytest.mark.once


def test_every_result_is_quoted() -> None:
    named = {found for page in PAGES for found in re.findall(r"benchmarks/results/([\w.-]+)\.md", page.read_text())}
    files = {path.name for path in RESULTS.iterdir()}
    assert files == {name for stem in named for name in (f"{stem}.md", *numbers(stem))}


def numbers(stem: str) -> list[str]:
    """The files with the numbers of a page: of a day with a GPU one for each part."""
    return [path.name for path in RESULTS.glob(f"{stem}_*.json")] or [f"{stem}.json"]

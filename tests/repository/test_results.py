"""Every result in benchmarks/results/ is quoted by a document, and every one that a document names is there."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import PAGES, ROOT

RESULTS = ROOT / "benchmarks" / "results"
pytestmark = pytest.mark.once


def test_every_result_is_quoted() -> None:
    named = {found for page in PAGES for found in re.findall(r"benchmarks/results/([\w.-]+)\.md", page.read_text())}
    files = sorted(path.name for path in RESULTS.iterdir())
    assert files == sorted(f"{stem}.{kind}" for stem in named for kind in ("json", "md"))

"""The callback where two processes train one model: ranks agree, and there is one report."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.integrations import callback_steps
from tests.models.ranks import Ranks

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks()  # of its own: accelerate's state stays in a process
    made.run(callback_steps.imported)
    yield made
    made.stop()


@pytest.mark.slow
@pytest.mark.parametrize("steps", ["callback", "callbacks_that_differ", "beyond_the_plan"])
def test_it_trains(ranks: Ranks, steps: str, tmp_path: Path) -> None:
    ranks.run(getattr(callback_steps, steps), folder=str(tmp_path))

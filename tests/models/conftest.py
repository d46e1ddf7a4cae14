"""Markers of tests/models: what runs with one torch alone, and with new transformers alone; and a fixture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptfused.layer.parts import Reason
from ckptfused.models.derive.family import DERIVED
from tests.models.versions import since
from tests.models.zoo import ZOO, Specimen

FOLDER = Path(__file__).parent
EVERY_PATH = ("test_float32", "test_bfloat16")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What convert does with a library's model it does with every torch, but where a test says `each_torch`. Of layers
    that are not fused with an old transformers, only what holds for all layers is tested with it."""
    for item in items:
        if item.path.is_relative_to(FOLDER) and item.get_closest_marker("each_torch") is None:
            item.add_marker(pytest.mark.once)
        if not isinstance(item, pytest.Function) or item.originalname in EVERY_PATH or not hasattr(item, "callspec"):
            continue
        for value in item.callspec.params.values():
            specimen = ZOO.get(value) if isinstance(value, str) else value
            if isinstance(specimen, Specimen):
                item.add_marker(since(specimen.since, f"{specimen.name} is fused"))


@pytest.fixture
def reasons() -> Iterator[list[Reason]]:
    """Why calls of converted layers were not fused, as they come."""
    from tests.models.small import unfused  # late: it needs transformers

    with unfused() as found:
        yield found


@pytest.fixture
def underived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers without an adapter run generically, whatever they compute."""
    monkeypatch.setattr(DERIVED, "call", lambda *given, **options: Reason("nothing is derived in this test"))

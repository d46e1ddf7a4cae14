"""Of layers that are not fused with an old transformers, only what holds for all layers is tested with it."""

from __future__ import annotations

import pytest

from tests.convert.versions import since
from tests.convert.zoo import ZOO, Specimen

EVERY_PATH = ("test_float32", "test_bfloat16")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not isinstance(item, pytest.Function) or item.originalname in EVERY_PATH or not hasattr(item, "callspec"):
            continue
        for value in item.callspec.params.values():
            specimen = ZOO.get(value) if isinstance(value, str) else value
            if isinstance(specimen, Specimen):
                item.add_marker(since(specimen.since, f"{specimen.name} is fused"))

"""What every test runs under."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """The same seed for every test, and no determinism setting left behind by another."""
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)

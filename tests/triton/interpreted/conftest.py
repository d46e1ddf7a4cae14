"""Every test here runs in Triton's interpreter."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.triton.bounds import watch
from tests.triton.interpreter import mend

mend()
watch()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # NumPy speaks of NaN and overflow where a GPU is silent.
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))

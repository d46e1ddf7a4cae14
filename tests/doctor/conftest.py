"""What the doctor's tests run under."""

from __future__ import annotations

import pytest

from ckptfused.doctor import training


@pytest.fixture(autouse=True)
def _a_cpu_without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same advice on every machine."""
    monkeypatch.setattr(training, "knows_bfloat16", lambda device: False)

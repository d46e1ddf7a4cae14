"""The tests in interpreted/ need a process whose Triton interprets: test_interpreter.py starts it."""

from __future__ import annotations

import os

import pytest
import torch

from tests.triton.clock import Clock

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What torch.cuda's events go by."""
    found = Clock()
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return found

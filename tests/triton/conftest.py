"""The tests in interpreted/ need a process whose Triton interprets, those in launched/ one with a driver that is not
CUDA's: test_interpreter.py and test_launched.py start them."""

from __future__ import annotations

import os

import pytest
import torch

from tests.triton.clock import Clock

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
collect_ignore += [] if os.environ.get("CKPTFUSED_FAKE_CUDA") == "1" else ["launched"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What torch.cuda's events go by."""
    found = Clock()
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return found

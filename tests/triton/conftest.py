"""The tests in interpreted/ need a process whose Triton interprets: test_interpreter.py starts it."""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]

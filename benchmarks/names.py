"""The commands of `python -m benchmarks`; nothing is imported for them, so that a wrong one is said at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

NAMES = (
    *(
        "step",
        "encoder-step",
        "whole-step",
        "step-time",
        "lora-step",
        "mixture-step",
        "loss-head",
        "ffn-scratch",
        "policies",
    ),
    *(
        "planned-steps",
        "attention",
        "host-time",
        "small-shapes",
        "checkpoint-time",
        "certificate",
        "predicted-steps",
        "profile-error",
    ),
    *("profile-order", "trainer-curves", "step-profile", "host-time-gpu"),
)
"""Commands whose module declares a `BENCHMARK`."""
OTHERS = ("families", "architectures", "draw", "compare")
"""Commands that print or write documents, or compare results."""


def options() -> set[str]:
    """The options of all commands, as their sources have them: fields of sizes, and what parsers add."""
    found: set[str] = set()
    for path in Path(__file__).parent.glob("*.py"):
        source = path.read_text()
        found.update(f"--{name.replace('_', '-')}" for name in re.findall(r"^    (\w+): ", source, re.MULTILINE))
        found.update(re.findall(r'"(--[\w-]+)"', source))
    return found


def foreign(words: Sequence[str]) -> str | None:
    """The first of these that is an option of no command, not even in short; None: there is none."""
    asked, known = (word.partition("=")[0] for word in words if word.startswith("--")), options()
    return next((word for word in asked if not any(option.startswith(word) for option in known)), None)

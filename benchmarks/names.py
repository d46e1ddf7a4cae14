"""The commands of `python -m benchmarks`; nothing is imported for them, so that a wrong one is said at once."""

from __future__ import annotations

import itertools
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
        "long-block",
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
    found = {"--list", "--help"}
    for path in Path(__file__).parent.glob("*.py"):
        source = path.read_text(encoding="utf-8")
        for sizes in re.findall(r"^class \w*Sizes\b.*\n((?:    .*\n|\n)+)", source, re.MULTILINE):
            found.update(f"--{name.replace('_', '-')}" for name in re.findall(r"^    (\w+): ", sizes, re.MULTILINE))
        found.update(re.findall(r'add_argument\([^)]*?"(--[\w-]+)"', source))
    return found


def foreign(words: Sequence[str]) -> str | None:
    """The first of these that is an option of no command, not even in short; None: there is none."""
    own, known = itertools.takewhile(lambda word: word != "--", words), options()
    asked = (word.partition("=")[0] for word in own if word.startswith("--"))
    return next((word for word in asked if not any(option.startswith(word) for option in known)), None)

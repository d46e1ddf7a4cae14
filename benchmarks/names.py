"""The commands of `python -m benchmarks`; nothing is imported for them, so that a wrong one is said at once."""

from __future__ import annotations

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

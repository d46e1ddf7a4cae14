"""What a training step of a whole model needs, before it runs."""

from __future__ import annotations

from ckptfused.policy.search import Longest, language_step, longest
from ckptfused.policy.step import StepMemory, adamw, step_memory

__all__ = ["Longest", "StepMemory", "adamw", "language_step", "longest", "step_memory"]

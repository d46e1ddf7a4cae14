"""What a training step of a whole model needs, before it runs."""

from __future__ import annotations

from ckptfused.policy.step import StepMemory, step_memory

__all__ = ["StepMemory", "step_memory"]

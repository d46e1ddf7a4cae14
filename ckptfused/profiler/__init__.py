"""One training step of a model: its bytes and seconds, by layer and by moment, measured or predicted."""

from __future__ import annotations

from ckptfused.profiler.api import profile
from ckptfused.profiler.phases import LayerProfile
from ckptfused.profiler.result import Profile
from ckptfused.profiler.step import adamw

__all__ = ["LayerProfile", "Profile", "adamw", "profile"]

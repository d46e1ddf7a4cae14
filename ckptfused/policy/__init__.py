"""What a training step of a whole model needs, before it runs."""

from __future__ import annotations

from ckptfused.policy.api import profile
from ckptfused.policy.budget import BudgetError
from ckptfused.policy.parts import LayerProfile
from ckptfused.policy.plan import Plan, plan
from ckptfused.policy.result import Profile
from ckptfused.policy.search import Longest, language_step, longest
from ckptfused.policy.step import adamw

__all__ = [
    "BudgetError",
    "LayerProfile",
    "Longest",
    "Plan",
    "Profile",
    "adamw",
    "language_step",
    "longest",
    "plan",
    "profile",
]

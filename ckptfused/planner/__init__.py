"""Plans: the fastest way to train a model within a budget of memory."""

from __future__ import annotations

from ckptfused.planner.budget_error import BudgetError
from ckptfused.planner.plan import Plan

__all__ = ["BudgetError", "Plan"]

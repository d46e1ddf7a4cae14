"""Holds that what a user asks of a training step goes through the package as one value, `TrainingStep`."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

from ckptfused.profiler.step import TrainingStep

PACKAGE = Path(__file__).resolve().parents[2] / "ckptfused"
STEP = {field.name for field in fields(TrainingStep)}
PUBLIC = {"convert": "convert", "plan": "planner/plan", "profile": "profiler/api", "doctor": "doctor/api"}
"""Functions whose keywords describe a step, and their files."""


def step_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    given = function.args
    return {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)} & STEP


def described(path: Path) -> dict[str, set[str]]:
    """The functions of a file that take more than two of a step's parts."""
    tree = ast.walk(ast.parse(path.read_text()))
    functions = (node for node in tree if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {f.name: parts for f in functions if len(parts := step_parameters(f)) > 2}


def test_a_step_is_handed_down_as_one_value() -> None:
    assert {"batch", "optimizer", "device", "autocast", "gradient_accumulation_steps", "shards", "release"} == STEP
    found = {
        (name, str(path.relative_to(PACKAGE).with_suffix("")))
        for path in PACKAGE.rglob("*.py")
        for name in described(path)
    }
    assert found == set(PUBLIC.items())

"""Committed results, as documents quote them."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.runner import RESULTS


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def case_of(found: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Sizes and rows of a result's first case, and its threads."""
    case = found["cases"][0]
    return case["sizes"], case["rows"], found["environment"]["threads"]


def seconds(rows: dict[str, Any], name: str) -> float:
    return rows[name]["median"]

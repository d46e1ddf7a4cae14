"""A benchmark in small, as the command line runs it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import runner


@pytest.fixture
def measured(tmp_path: Path) -> Callable[[str], tuple[str, dict[str, Any], dict[str, Any]]]:
    """Runs a benchmark, three rounds of it: the stem of its files, its result, and the rows of the only case."""

    def run(words: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
        before = torch.get_num_threads()
        try:
            assert runner.main([*shlex.split(words), "--budget", "0", "--threads", "1", "--out", str(tmp_path)]) == 0
        finally:
            torch.set_num_threads(before)
        (path,) = tmp_path.glob("*.json")
        result = json.loads(path.read_text())
        assert path.with_suffix(".md").read_text() == runner.page(runner.module(result["benchmark"]).BENCHMARK, result)
        (case,) = result["cases"]
        return path.stem, result, case["rows"]

    return run

"""The measurements of policies, plans and certificates: they check first, and write what they found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import certificate, draw, planned_steps, policies, runner
from benchmarks.benchmark import MIB
from benchmarks.llama import check_losses

pytestmark = pytest.mark.once
SMALL = (
    "--layers 4 --width 64 --hidden 96 --heads 2 --vocabulary 64 --batch 2 --tokens 256 --budget 0 --threads 1 --out"
)


def small_run(command: str, folder: Path, *more: str) -> dict[str, Any]:
    before = torch.get_num_threads()
    try:
        assert runner.main([command, *SMALL.split(), str(folder), *more]) == 0
    finally:
        torch.set_num_threads(before)
    assert (folder / f"{command}-4x64.md").read_text().startswith("# ")
    return json.loads((folder / f"{command}-4x64.json").read_text())


def test_policies_of_guides(tmp_path: Path) -> None:
    result = small_run("policies", tmp_path)
    rows = result["cases"][0]["rows"]
    assert list(rows) == list(policies.policies(4))
    peak = {name: row["peak"] for name, row in rows.items()}
    assert peak["none"] > peak["every 2"] > peak['keep="inputs"'] == peak["inputs, offloaded"]
    assert peak['keep="all"'] > peak["selective ffn"] > peak['keep="inputs"']
    assert all(row["steps"] >= 3 for row in rows.values())
    draw.draw_policies(tmp_path / "picture.svg", result)
    assert (tmp_path / "picture.svg").read_text().count(">whole model<") == 1


def test_plans_beside_policies_made_by_hand(tmp_path: Path) -> None:
    rows = small_run("planned-steps", tmp_path)["cases"][0]["rows"]
    plans = [row for row in rows.values() if "budget" in row]
    assert len(plans) == len(planned_steps.SHARES) == len(rows) - len(planned_steps.by_hand({}))
    for row in plans:
        assert row["predicted"] <= row["budget"]
        # What PyTorch's operators allocate within themselves on the CPU; it does not grow with the layers.
        assert abs(row["peak"] - row["predicted"]) < MIB / 8


@pytest.mark.parametrize(
    "kind", ["ckptfused", pytest.param("PyTorch, without random states", marks=pytest.mark.extended)]
)
def test_a_certificate_beside_a_step(kind: str, tmp_path: Path) -> None:
    """It needs the memory of a step that saves everything, with a copy of the weights and one of the gradients."""
    (case,) = small_run("certificate", tmp_path, "--by", kind)["cases"]
    assert case["case"] == kind
    rows = case["rows"]
    saving, proof = rows[certificate.SAVING]["peak"], rows[certificate.CERTIFICATE]["peak"]
    assert saving < proof <= saving + 2 * rows[certificate.SAVING]["weights"] + MIB / 8
    assert rows[certificate.STEP]["steps"] >= 3


def test_another_loss_is_refused() -> None:
    assert check_losses({"a": 2.0, "b": 2.0 + 2e-6}, "a") == pytest.approx(1e-6)
    for other in (2.1, float("nan")):
        with pytest.raises(SystemExit, match="no time reported"):
            check_losses({"a": 2.0, "b": other}, "a")

"""The measurements of policies, plans and certificates: they check first, and write what they found."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import certificate, draw, planned_steps, policies
from benchmarks.llama import MIB, check_losses

pytestmark = pytest.mark.once
SMALL = (
    "--layers 4 --width 64 --hidden 96 --heads 2 --vocabulary 64 --batch 2 --tokens 256 --budget 0 --threads 1 --out"
)


def small_run(command: ModuleType, stem: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", [f"{stem}.py", *SMALL.split(), str(folder)])
    before = torch.get_num_threads()
    try:
        command.main()
    finally:
        torch.set_num_threads(before)
    assert (folder / f"{stem}-4x64.md").read_text().startswith("# ")
    return json.loads((folder / f"{stem}-4x64.json").read_text())


def test_policies_of_guides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = small_run(policies, "policies", monkeypatch, tmp_path)
    rows = result["rows"]
    assert list(rows) == list(policies.variants(4))
    peak = {name: row["peak"] for name, row in rows.items()}
    assert peak["none"] > peak["every 2"] > peak['keep="inputs"'] == peak["inputs, offloaded"]
    assert peak['keep="all"'] > peak["selective ffn"] > peak['keep="inputs"']
    assert all(row["seconds"]["steps"] >= 3 for row in rows.values())
    draw.draw_policies(tmp_path / "picture.svg", result)
    assert (tmp_path / "picture.svg").read_text().count(">whole model<") == 1


def test_plans_beside_policies_made_by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = small_run(planned_steps, "planned-steps", monkeypatch, tmp_path)
    assert len(result["rows"]) == len(planned_steps.SHARES)
    for row in result["rows"]:
        assert row["predicted"] <= row["budget"]
        # What PyTorch's operators allocate within themselves on the CPU; it does not grow with the layers.
        assert abs(row["measured"] - row["predicted"]) < MIB / 8


@pytest.mark.parametrize(
    "kind", ["ckptfused", pytest.param("PyTorch, without random states", marks=pytest.mark.extended)]
)
def test_a_certificate_beside_a_step(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It needs the memory of a step that saves everything, with a copy of the weights and one of the gradients."""
    kinds = {kind: certificate.MODELS[kind]}
    monkeypatch.setattr(certificate, "MODELS", kinds)
    result = small_run(certificate, "certificate", monkeypatch, tmp_path)
    assert result["rows"].keys() == kinds.keys()
    for row in result["rows"].values():
        saving, proof = row["bytes"][certificate.SAVING], row["bytes"][certificate.CERTIFICATE]
        assert saving < proof <= saving + 2 * result["weights"] + MIB / 8
        assert row["seconds"][certificate.STEP]["steps"] >= 3


def test_another_loss_is_refused() -> None:
    assert check_losses({"a": 2.0, "b": 2.0 + 2e-6}, "a") == pytest.approx(1e-6)
    for other in (2.1, float("nan")):
        with pytest.raises(SystemExit, match="no time reported"):
            check_losses({"a": 2.0, "b": other}, "a")

"""The measurements of policies, plans and certificates: they check first, and write what they found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import certificate, drawings, planned_steps, policies
from benchmarks.benchmark import MIB
from benchmarks.llama import check_losses

pytestmark = pytest.mark.once
SMALL = "--layers 4 --width 64 --hidden 96 --heads 2 --vocabulary 64 --batch 2 --tokens 256"


@pytest.mark.slow
def test_policies_of_guides(measured: Any, tmp_path: Path) -> None:
    stem, result, rows = measured(f"policies {SMALL}")
    assert stem == "policies-4x64" and list(rows) == list(policies.policies(4))
    peak = {name: row["peak"] for name, row in rows.items()}
    assert peak["none"] > peak["every 2"] > peak['keep="inputs"'] == peak["inputs, offloaded"]
    assert peak['keep="all"'] > peak["selective ffn"] > peak['keep="inputs"']
    assert all(row["steps"] >= 3 for row in rows.values())
    drawings.draw_policies(tmp_path / "picture.svg", result)
    assert (tmp_path / "picture.svg").read_text().count(">whole model<") == 1


@pytest.mark.slow
def test_plans_beside_policies_made_by_hand(measured: Any) -> None:
    stem, _, rows = measured(f"planned-steps {SMALL}")
    assert stem == "planned-steps-4x64"
    plans = [row for row in rows.values() if "budget" in row]
    assert len(plans) == len(planned_steps.SHARES) == len(rows) - len(planned_steps.by_hand({}))
    for row in plans:
        assert row["predicted"] <= row["budget"]
        # What PyTorch's operators allocate within themselves on the CPU; it does not grow with the layers.
        assert abs(row["peak"] - row["predicted"]) < MIB / 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["ckptfused", pytest.param("PyTorch, without random states", marks=pytest.mark.extended)]
)
def test_a_certificate_beside_a_step(kind: str, measured: Any) -> None:
    """It needs the memory of a step that saves everything, with a copy of the weights and one of the gradients."""
    stem, result, rows = measured(f"certificate {SMALL} --by '{kind}'")
    assert stem == "certificate-4x64" and result["cases"][0]["case"] == kind
    saving, proof = rows[certificate.SAVING]["peak"], rows[certificate.CERTIFICATE]["peak"]
    assert saving < proof <= saving + 2 * rows[certificate.SAVING]["weights"] + MIB / 8
    assert rows[certificate.STEP]["steps"] >= 3


def test_another_loss_is_refused() -> None:
    assert check_losses({"a": 2.0, "b": 2.0 + 2e-6}, "a") == pytest.approx(1e-6)
    for other in (2.1, float("nan")):
        with pytest.raises(SystemExit, match="no time reported"):
            check_losses({"a": 2.0, "b": other}, "a")

"""Holds that code which runs for tensors and for counts alike asks one place, in each language, which it is."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BELOW_SIMULATE = ("eager", "triton", "ops", "recompute", "offload", "loss", "layer", "modules", "explain")
"""Rooms of code that trains."""


def naming(pattern: str, *files: Path) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in files if re.search(pattern, path.read_text())}


def test_only_the_ledger_and_the_counted_ops_know_the_open_ledger() -> None:
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in {".h", ".inl", ".cpp", ".cu", ".cuh"}]
    own = {"csrc/ops/ledger.h", "csrc/ops/ledger.cpp", "csrc/ops/counted.cpp"}
    assert naming(r"\bLedger::current\b", *sources) == own
    assert len(naming(r"\bcounting\(\)", *sources)) > 5


def test_only_checks_and_the_open_ledger_ask_for_tensors_without_data() -> None:
    package = ROOT / "ckptfused"
    files = [*package.glob("*.py"), *(path for room in BELOW_SIMULATE for path in (package / room).rglob("*.py"))]
    # A rotary table is shared by calls with data alone, whoever made the others.
    assert naming(r"\bis_meta\b", *files) == {"ckptfused/checks.py", "ckptfused/modules/rotary.py"}
    assert naming(r"import .*\bcounting\b", *files) == {"ckptfused/ops/fake.py"}

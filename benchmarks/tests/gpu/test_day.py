"""The day with a GPU, rehearsed: `make gpu` from end to end on canned results, up to the README's lines."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import figures
from benchmarks.gpu.parts import Outcome, Part

CANNED = json.loads(Path(__file__).with_name("canned.json").read_text())
"""What scripts write on a GPU, as far as pages and the README's lines have it: a file for each part."""
MEASURED = ("smoke", "block", "micro", "attention", "profile")

pytestmark = pytest.mark.once


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of results, after a `make gpu` whose parts left canned files: all went well but the suite."""

    def run_part(part: Part, seconds: float, capability: str, stem: str, out: Path, *more: Any) -> Outcome:
        assert capability == "9.0" and 0 < seconds <= part.most
        if part.name in MEASURED:
            environment = CANNED["environment"] | {"command": f"make gpu PARTS={part.name}"}
            result = {"case": part.name, **CANNED[part.name], "environment": environment}
            (out / f"{stem}_{part.name}.json").write_text(json.dumps(result))
        failed = part.name == "suite"
        return Outcome("failed (exit status 1)" if failed else "ok", 3.0, "1 failed, 5 passed" if failed else "done")

    monkeypatch.setattr(command, "gpu", lambda: ("NVIDIA H200", "9.0"))
    monkeypatch.setattr(command, "built_for", lambda capability: "")
    monkeypatch.setattr(command.extension, "place", lambda: "")
    monkeypatch.setattr(command, "run_part", run_part)
    monkeypatch.setattr(sys, "argv", ["make gpu", "--out", str(tmp_path)])
    assert command.main() == 1  # the suite
    return tmp_path


def stem_of(day: Path) -> str:
    (page,) = day.glob("*.md")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_nvidia-h200", page.stem)
    return page.stem


def test_the_page(day: Path) -> None:
    page = (day / f"{stem_of(day)}.md").read_text()
    assert page.startswith("# GPU: NVIDIA H200, compute capability 9.0\n")
    assert "| build | ok | " in page and "| made elsewhere |" in page
    assert "| suite | failed (exit status 1) | 3 s | 1 failed, 5 passed |" in page
    assert page.count(" | ok | ") == 8  # every other part
    goals = [line for line in page.splitlines() if " | ≤ " in line or " | ≥ " in line]
    found = [goal for name in MEASURED for goal in CANNED[name]["goals"]]
    assert len(goals) == len(found) > 5
    assert sum(" | NO | " in line for line in goals) == sum(not goal["met"] for goal in found) > 0
    for text in ("cudnn attention", "| ckptfused attention+mid+qkv |", "| rms_norm_backward |", "tile's dW, float32"):
        assert text in page
    assert "commit 0123456789" in page


def test_no_more_files_than_come_back(day: Path) -> None:
    """Eight, of a rented machine: a file for each part that measures, the page and the log."""
    assert len(list(day.iterdir())) == len(MEASURED) + 2


def test_the_readmes_lines(day: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["figures", str(day), "--stem", stem_of(day)])
    figures.main()
    text = capsys.readouterr().out
    ms = {name: times["median"] for name, times in CANNED["block"]["milliseconds"].items()}
    ratio, faster = ms["ckptfused inputs"] / ms["eager"], ms["ckptfused inputs"] / ms["eager checkpoint"]
    assert text.startswith(
        "On an NVIDIA H200 (torch 2.11.0+cu130, commit 0123456) a Llama-3-8B layer on 2 x 8192 tokens"
    )
    assert (
        f"takes {ratio:.2f} of the eager layer's step and {faster:.2f} of that under `torch.utils.checkpoint`" in text
    )
    assert f'| `keep="inputs"` | {ms["ckptfused inputs"]:.1f} | {ratio:.2f} | 8192 | 4096 |' in text
    assert f"| eager, as Hugging Face writes it | {ms['eager']:.1f} | 1.00 | 200840 | 4096 |" in text
    least = min(row["of copy"] for row in CANNED["micro"]["ops"] if row["goal"])
    assert f"Row kernels reach {100 * least:.0f} % (rms norm forward) to " in text
    attention = CANNED["attention"]["goals"]
    assert f"attention: flash without dropout over ours with: {attention[0]['value']:.2f}." in text


def test_without_a_block_there_is_nothing_to_quote(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"expected day_chip_block.json in "):
        figures.figures(tmp_path, "day_chip")


def test_parts_share_the_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each leaves those behind it their least; where nothing is left, a part is not run."""
    handed: dict[str, float] = {}

    def run_part(part: Part, seconds: float, *more: Any) -> Outcome:
        handed[part.name] = seconds
        return Outcome("ok")

    monkeypatch.setattr(command, "built_for", lambda capability: "")
    monkeypatch.setattr(command.extension, "place", lambda: "")
    monkeypatch.setattr(command, "run_part", run_part)
    chosen = [part for part in command.PARTS if part.unasked]
    for budget in (120.0, 10_000.0):
        handed.clear()
        outcomes = command.run_parts(chosen, "9.0", "stem", tmp_path, tmp_path / "log", budget, False)
        assert outcomes.keys() == {part.name for part in chosen}
        for index, part in enumerate(chosen):
            if part.name in handed:
                later = sum(other.least for other in chosen[index + 1 :])
                assert handed[part.name] <= min(part.most, budget - later)
            else:
                assert outcomes[part.name].status == ("ok" if part.name == "build" else "not run")
        assert (len(handed) == len(chosen) - 1) == (budget > 1000)

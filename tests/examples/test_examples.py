"""The examples run, small, and do what they say."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckptfused.cli.configurations import MODELS
from tests import tools

pytestmark = pytest.mark.once

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Runs an example in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def example(name: str, *options: str) -> None:
        monkeypatch.setattr(sys, "argv", [name, *options])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")

    return example


def test_a_resumed_run_ends_with_the_bits_of_one_that_never_stopped(run) -> None:
    """Whatever is kept: the resumed run keeps everything, the other one inputs alone."""
    run("train.py", "--steps", "5", "--save", "whole.pt")
    run("train.py", "--steps", "2", "--save", "part.pt")
    run("train.py", "--steps", "5", "--save", "part.pt", "--resume", "--keep", "all")
    whole, part = torch.load("whole.pt"), torch.load("part.pt")
    assert whole["step"] == part["step"] == 5
    assert torch.equal(whole["rng"], part["rng"])
    for name, weight in whole["model"].items():
        assert torch.equal(weight, part["model"][name]), name


def test_a_run_that_resumes_without_its_random_state_ends_elsewhere(run) -> None:
    """The test above would see it."""
    run("train.py", "--steps", "5", "--save", "whole.pt")
    run("train.py", "--steps", "2", "--save", "part.pt")
    state = torch.load("part.pt")
    torch.save({**state, "rng": torch.Generator().manual_seed(9).get_state()}, "part.pt")
    run("train.py", "--steps", "5", "--save", "part.pt", "--resume")
    whole, part = torch.load("whole.pt")["model"], torch.load("part.pt")["model"]
    assert not all(torch.equal(weight, part[name]) for name, weight in whole.items())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_lora_through_trainer(run, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tools.need("transformers", "peft", "accelerate")
    run("trainer_lora.py", "--steps", "5")
    assert "2 layers: 2 fused" in (out := capsys.readouterr().out)
    assert re.search(r"'train_loss': '?[\d.]+", out)
    assert (tmp_path / "trainer_lora/adapter_model.safetensors").exists()


@pytest.mark.slow
def test_plans_for_a_card(
    run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tools.need("transformers", "peft", "rich")
    monkeypatch.setitem(MODELS, "llama-3-8b", MODELS["llama-3-8b"] | {"num_hidden_layers": 8})
    run("budget.py", "--tokens", "512", "--batch", "1", "--card", "h100")
    out = capsys.readouterr().out
    assert out.count("this plan") == 2 and "LoRA, one card of 80 GB" in out
    assert (tmp_path / "plan-h100.png").exists()


@pytest.mark.slow
def test_fsdp2_on_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run(
        [*command, str(Path(__file__).with_name("left_early.py")), str(EXAMPLES / "fsdp2.py"), "--steps", "5"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    assert "2 layers: 2 fused" in ran.stdout
    assert re.search(r"step 5: loss 0?\.?\d", ran.stdout)


def test_every_example_is_tested_and_short() -> None:
    files = sorted(EXAMPLES.glob("*.py"))
    assert [file.name for file in files] == ["budget.py", "fsdp2.py", "train.py", "trainer_lora.py"]
    for file in files:
        assert len(file.read_text().splitlines()) < 80, file.name

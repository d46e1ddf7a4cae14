"""The command that plans: what it prints, writes and returns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptfused import CheckpointPolicy
from ckptfused.cli import main

pytestmark = pytest.mark.once
CONFIG = {
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FACTORY = """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.mean()
def make():
    return Model(), torch.empty(512, 64)
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return ["plan", "--config", str(tmp_path / "config.json"), "--batch", "2", "--seq", "256"]


def test_a_plan(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, policy = str(tmp_path / "plan.png"), str(tmp_path / "policy.json")
    assert main([*command, "--budget", "45MB", "--json", "--plot", picture, "--policy", policy]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["peak"] <= found["budget"] == 45_000_000 and found["device"] == "h200"
    assert CheckpointPolicy.from_dict(found["policy"]) == CheckpointPolicy.from_json(Path(policy).read_text())
    assert CheckpointPolicy.from_dict(found["policy"]).digest == found["digest"]
    assert Path(picture).read_bytes().startswith(b"\x89PNG")
    assert main([*command, "--budget", "45MB"]) == 0
    out = capsys.readouterr().out
    assert found["digest"] in out and "per layer" in out


def test_nothing_fits(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--budget", "1MiB", "--json"]) == 2
    said = capsys.readouterr()
    assert "least" in said.err and "shards=8" in said.err
    found = json.loads(said.out)
    assert found["fits"] is False
    assert main([*command, "--budget", str(found["least"])]) == 0
    assert main([*command, "--budget", str(found["least"] - 1)]) == 2
    shared = [*command, "--budget", str(found["least"] - 1), "--shards", "8", "--lora", "4"]
    assert main(shared) == 0


def test_a_model_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_model_to_plan.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--config", "own_model_to_plan:make", "--budget", "1GiB", "--optimizer", "none"]) == 0
    assert "as it was" in capsys.readouterr().out


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--help"])
    said = capsys.readouterr().out
    assert stopped.value.code == 0 and "Exit status 2" in said and "Example: python -m ckptfused plan" in said
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--config", "llama-3-8b", "--budget", "much"])
    assert stopped.value.code == 2 and "expected a number of bytes" in capsys.readouterr().err

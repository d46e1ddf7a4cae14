"""The command that plans: what it prints, writes and returns."""

from __future__ import annotations

import json
import re
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
    "num_hidden_layers": 4,
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
    print("of the factory")
    return Model(), torch.empty(512, 64)
def fails():
    raise RuntimeError("no weights here")
def three():
    return Model(), 1, 2
def narrow():
    return Model(), torch.empty(512, 63)
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return ["plan", "--config", str(tmp_path / "config.json"), "--batch", "2", "--seq", "256"]


@pytest.mark.slow
def test_a_plan(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, policy = str(tmp_path / "plan.png"), str(tmp_path / "policy.json")
    assert main([*command, "--budget", "30MB", "--json", "--plot", picture, "--policy", policy]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["peak"] <= found["budget"] == 30_000_000 and found["device"] == "h200"
    assert CheckpointPolicy.from_dict(found["policy"]) == CheckpointPolicy.from_json(Path(policy).read_text())
    assert CheckpointPolicy.from_dict(found["policy"]).digest == found["digest"]
    assert Path(picture).read_bytes().startswith(b"\x89PNG")
    assert main([*command, "--budget", "30MB"]) == 0
    out = capsys.readouterr().out
    assert found["digest"] in out and "per layer" in out


@pytest.mark.slow
def test_nothing_fits(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--budget", "1MiB", "--json"]) == 3
    said = capsys.readouterr()
    assert "least" in said.err and "shards=8" in said.err
    found = json.loads(said.out)
    assert found["fits"] is False
    assert main([*command, "--budget", str(found["least"])]) == 0
    assert main([*command, "--budget", str(found["least"] - 1)]) == 3
    adapted = [*command, "--lora", "4", "--budget", "1MiB"]
    capsys.readouterr()
    assert main(adapted) == 3 and "LoRA" not in capsys.readouterr().err  # it is there
    shared = [*command, "--budget", str(found["least"] - 1), "--shards", "8", "--lora", "4"]
    assert main(shared) == 0


def test_a_model_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_model_to_plan.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--config", "own_model_to_plan:make", "--budget", "1GiB", "--optimizer", "none"]) == 0
    assert "as it was" in capsys.readouterr().out
    assert main(["plan", "--config", "own_model_to_plan:make", "--budget", "1GiB", "--json", "--device", "H100"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["device"] == "h100" and "of the factory" in said.err


@pytest.mark.parametrize("command", ["plan", "profile", "doctor"])
@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("fails", r"RuntimeError: no weights here \(own_model_that_fails.py, line [0-9]+\)$"),
        ("three", r"to return a model, or \(model, batch\), got a tuple of 3$"),
        ("narrow", r"(reduction dim|cannot be multiplied)"),
        ("Model.nothing", "got 'own_model_that_fails:Model.nothing'"),
    ],
)
def test_what_goes_wrong_is_one_line(
    command: str,
    factory: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "own_model_that_fails.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    budget = ["--budget", "1GiB"] if command == "plan" else []
    assert main([command, "--config", f"own_model_that_fails:{factory}", *budget]) == 1
    said = capsys.readouterr()
    assert said.out == "" and re.search(message, said.err.strip()) and said.err.count("\n") == 1


def test_the_place_of_a_fault_is_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_model_that_is_narrow.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "--config", "own_model_that_is_narrow:narrow"]) == 1
    assert capsys.readouterr().err.endswith("(own_model_that_is_narrow.py, line 10)\n")


@pytest.mark.parametrize(
    ("config", "of"),
    [
        ({"model_type": "t5", "d_model": 64, "num_layers": 1, "vocab_size": 300}, "encoder.block.0"),
        ({"model_type": "bart", "d_model": 64, "encoder_layers": 1, "decoder_layers": 1}, "model.decoder.layers.0"),
        ({"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}, "bert.encoder"),
    ],
)
def test_configurations_of_other_kinds(
    config: dict[str, object], of: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["profile", "--config", str(tmp_path / "config.json"), "--seq", "32"]) == 0
    assert of in capsys.readouterr().out
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 65}))
    assert main(["profile", "--config", str(tmp_path / "config.json"), "--seq", "32"]) == 1
    assert re.search("--config: .*hidden size .65. is not a multiple", capsys.readouterr().err)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    assert main(["profile", "--config", str(tmp_path / "config.json")]) == 1
    assert "expected a model of language" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "1, the command failed" in said and "2, its options are wrong; 3, it ran, and the answer is no" in said
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--help"])
    said = capsys.readouterr().out
    assert stopped.value.code == 0 and "Exit status 3" in said and "Example: python -m ckptfused plan" in said
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--config", "llama-3-8b", "--budget", "much"])
    assert stopped.value.code == 2 and "expected a number of bytes" in capsys.readouterr().err


@pytest.mark.slow
def test_autocast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command that predicts a step takes it, and says it."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 2}))
    rest = ["--config", str(tmp_path / "config.json"), "--dtype", "float32", "--autocast", "float16", "--json"]
    saved = []
    for command in (["profile"], ["plan", "--budget", "1GiB"], ["context", "--memory", "64MB"]):
        assert main([*command, *rest]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["autocast"] == "float16"
        saved.append(sum(layer["saved"] for layer in found.get("layers", ())))
    assert main(["profile", *rest[:4], "--json"]) == 0
    assert saved[0] < sum(layer["saved"] for layer in json.loads(capsys.readouterr().out)["layers"])

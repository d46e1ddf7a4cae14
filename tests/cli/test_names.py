"""What people write for a card, a model or an option, and how soon a typo is answered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ckptfused import build_info, plan, profile
from ckptfused.cli import factories, main
from ckptfused.cli.configurations import MODELS, read_config
from ckptfused.cli.errors import CommandError
from ckptfused.simulate import cards
from ckptfused.simulate.devices import device_named
from ckptfused.sizes import size
from tests import forks

pytestmark = pytest.mark.once
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        ([], 2, "usage:"),
        (["--help"], 0, "context"),
        (["--version"], 0, "ckptfused "),
        (["pln"], 2, "did you mean plan?"),
        (["context", "--confg", "llama-3-8b"], 2, "there is no --confg; did you mean --config?"),
        (["profile", "--config", "no_such:factory"], 1, "(no module 'no_such')"),
        (["profile", "--config", "math:sqrtt"], 1, "did you mean sqrt?"),
        (["plan", "--config", "llama-3-8"], 1, "did you mean llama-3-8b?"),
        (["plan", "--config", "llama-3-8b", "--budget", "3XiB"], 2, "expected a number of bytes"),
        (["profile", "--config", "llama-3-8b", "--device", "h10"], 2, "did you mean h100?"),
        (["profile", "--config", "llama-3-8b", "--device", "A1000"], 2, "did you mean a100-80?"),
        (["doctor", "--config", "llama-3-8b", "--dtype", "bfloat6"], 2, "did you mean bfloat16?"),
        (["demo", "--steps", "0"], 1, "--steps: expected at least 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_typo_is_answered_without_pytorch(options: list[str], status: int, said: str, tmp_path: Path) -> None:
    """Whose import takes seconds; here it ends the command."""
    (tmp_path / "torch.py").write_text("raise SystemExit('PyTorch was imported')")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "-m", "ckptfused", *options]
    found = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert found.returncode == status and said in found.stdout + found.stderr, found


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("names:made_later", "[4, 4]"),
        ("names:from_elsewhere", "[4, 4]"),
        ("folder.inner:make_model", "[4, 4]"),
        ("folder.inner:make_modle", "did you mean make_model?"),
        ("json:lodas", "did you mean loads?"),
    ],
)
def test_where_names_come_from(config: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that are not in a module's source, and packages without __init__.py."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inner.py").write_text("import torch\ndef make_model(): return torch.nn.Linear(4, 4)\n")
    (tmp_path / "names.py").write_text(
        "from folder.inner import *\nfrom_elsewhere = make_model\nglobals()['made_' + 'later'] = make_model\n"
    )
    monkeypatch.chdir(tmp_path)
    for name in ("names", "folder", "folder.inner"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    try:
        factories.check_there(config)
        with factories.working_folder():
            found = str([*factories.find(config)().weight.shape])  # type: ignore[attr-defined]
    except CommandError as error:
        found = str(error)
    assert said in found


@pytest.mark.slow
def test_a_command_that_works_has_the_whole_package(tmp_path: Path) -> None:
    """Also for the user's function, which takes names from it and is in another process than `import ckptfused`."""
    (tmp_path / "own.py").write_text(
        "import ckptfused, torch\n"
        "def make():\n"
        "    model = torch.nn.Sequential(*(torch.nn.TransformerEncoderLayer(8, 2) for _ in range(2)))\n"
        "    ckptfused.convert(model)\n"
        "    return model, torch.empty(4, 2, 8)\n"
    )
    options = ["profile", "--config", "own:make", "--device", "A100", "--json"]
    found = forks.command("-m", "ckptfused", *options, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["device"] == "a100-80"


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    """The file that the build reads says the version, PyTorch's metadata its own."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"ckptfused {build_info()['version']}, PyTorch {torch.__version__}, ")


@pytest.mark.parametrize(
    ("text", "name"),
    [("A100", "a100-80"), ("4090", "rtx4090"), ("RTX 4090", "rtx4090"), ("b200", "b200"), ("NVIDIA H100 80GB", "h100")],
)
def test_names_of_cards(text: str, name: str) -> None:
    assert cards.device_name(text) == name and device_named(text).name == name


@pytest.mark.parametrize(
    ("found", "memory", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40"),
        ("NVIDIA A100 80GB PCIe", 79.2, "a100-80"),
        ("NVIDIA H200", 139.8, "h200"),
    ],
)
def test_the_gpu_at_hand(found: str, memory: float, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By PyTorch's name of it, with the memory that it has."""
    with pytest.raises(ValueError, match="PyTorch sees none"):
        device_named("cuda")
    size = int(memory * cards.GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: SimpleNamespace(name=found, total_memory=size))
    assert (device_named("cuda:0").name, device_named("cuda").memory) == (name, size)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: SimpleNamespace(name="T4", total_memory=1))
    with pytest.raises(ValueError, match="got 'T4' for 'cuda'"):
        device_named(torch.device("cuda"))


def test_where_a_configuration_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder's, and that of a model of the Hub's in the cache, of which nothing is downloaded."""
    config = {"model_type": "llama", "hidden_size": 8}
    commit = tmp_path / "models--some--model" / "snapshots" / "1234"
    commit.mkdir(parents=True)
    (commit / "config.json").write_text(json.dumps(config))
    (commit.parents[1] / "refs").mkdir()
    (commit.parents[1] / "refs" / "main").write_text("1234")
    assert read_config(str(commit)) == config
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert read_config("some/model") == config
    for missing in ("some/other", "not a name", str(tmp_path)):
        with pytest.raises(ValueError, match="expected llama-3-8b"):
            read_config(missing)
    with pytest.raises(ValueError, match="did you mean some/model"):
        read_config("Some/Modle")
    assert read_config("Qwen3-8B") == MODELS["qwen3-8b"]


def on_meta() -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(2))), torch.empty(8, 64)


def test_cards_know_their_memory() -> None:
    model, x = on_meta()
    h100 = cards.CARDS["h100"]
    alone, above = (plan(model, x, budget, torch.optim.SGD, "h100") for budget in (None, "80GiB"))
    assert alone.budget == h100.usable == 79 * cards.GIB - 79 * cards.GIB // 20
    assert "less 3.95 GiB for the CUDA context" in alone.notes[-1]
    assert above.notes[-1] == "the budget is above the 79.00 GiB that one h100 has"
    assert not plan(model, x, "79GiB", torch.optim.SGD, "h100").notes
    with pytest.raises(ValueError, match="budget: pass a number of bytes .*, for the memory of cpu is not known"):
        plan(model, x, None, torch.optim.SGD, "cpu")


def test_a_profile_says_into_which_cards_it_fits() -> None:
    model, x = on_meta()
    with torch.device("meta"):
        found = profile(model, torch.empty(1 << 26, 64), device="rtx4090")
    assert cards.CARDS["l40s"].usable < found.peak <= cards.CARDS["a100-80"].usable
    said = " ".join(str(found).split())
    assert "fits into one rtx4090" in said and "no, it needs" in said
    assert "into which it fits: h100, a100-80, h200, b200" in said
    assert json.loads(found.to_json())["fits"] == ["h100", "a100-80", "h200", "b200"]
    assert type(found).from_json(found.to_json()).peak == found.peak
    assert "fits" not in str(profile(model, x, device="cpu"))


FACTORY = """
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
CONFIG = LlamaConfig(hidden_size=32, intermediate_size=64, vocab_size=96, num_hidden_layers=2, num_attention_heads=2)
def language(name="labels"):
    ids = torch.zeros(2, 16, dtype=torch.int64)
    return LlamaForCausalLM(CONFIG), {"input_ids": ids, name: ids, "attention_mask": torch.ones_like(ids)}
def misspelt():
    return language("lables")
def without_input():
    model, batch = language()
    batch["input_idz"] = batch.pop("input_ids")
    return model, batch
def pictures():
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 500)), torch.empty(3, 4, 8, 8)
"""


@pytest.mark.slow
def test_a_model_of_ones_own_in_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Longest sequences of what has tokens, the largest batch of what has none."""
    (tmp_path / "own_models.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    asked = ["--device", "4090", "--memory", "4MiB", "--json"]

    def rows(*command: str) -> dict[str, Any]:
        assert main(["context", "--config", *command, *asked]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["device"] == "rtx4090"
        return found["variants"]

    tokens = rows("own_models:language", "--step", "16")
    assert next(iter(tokens)) == "as it is" and len(tokens) == 6
    assert 0 < tokens["as it is"]["tokens"] < tokens["convert(model)"]["tokens"]
    batches = rows("own_models:pictures", "--largest", "batch")
    assert list(batches) == ["as it is", "convert(model)"] and batches["as it is"]["sequences"] > 8
    assert max(row["peak"] for row in batches.values()) <= 4 << 20
    assert main(["context", "--config", "own_models:pictures", "--memory", "4MiB"]) == 1
    assert "expected tensors of [sequences, tokens]" in capsys.readouterr().err
    for option in (["--lora", "4"], ["--load-in-4bit"]):
        assert main(["context", "--config", "own_models:language", *option, *asked]) == 1
        assert (
            f"{option[0]}: for a configuration; own_models:language makes its model itself" in capsys.readouterr().err
        )
    assert main(["profile", "--config", "own_models:misspelt"]) == 1
    assert "has no argument 'lables'; did you mean labels?" in capsys.readouterr().err
    for command in ("profile", "doctor"):
        assert main([command, "--config", "own_models:without_input"]) == 1
        named = "has no argument 'input_idz'; did you mean input_ids?" in capsys.readouterr().err
        assert named or (command == "doctor" and sys.version_info < (3, 11))  # of which no error has notes
    assert main(["doctor", "--config", "own_models:misspelt"]) == 0
    assert "has no argument 'lables'; did you mean labels?" in " ".join(capsys.readouterr().out.split())
    for shards, advised in ((1, True), (8, False)):
        asked = ["--budget", "1KiB", "--shards", str(shards), "--device", "h100"]
        assert main(["plan", "--config", "own_models:pictures", *asked]) == 3
        said = capsys.readouterr().err
        assert "half as many samples" in said and "logits" not in said
        # Seven eighths of what is of parameters, not of the batch.
        assert ("FSDP2 over 8 ranks" in said) is advised
        if advised:
            parameters = sum(p.nbytes for p in sys.modules["own_models"].pictures()[0].parameters())
            assert f": about {size(4 * parameters * 7 // 8)} less" in said  # with gradients and AdamW

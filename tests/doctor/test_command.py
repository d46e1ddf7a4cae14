"""The command: a configuration without weights, a model of one's own, and what it says of mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from ckptfused.cli import main
from ckptfused.cli.configurations import MODELS

pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
]
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"vocab_size": 64, "head_dim": 16, "num_hidden_layers": 2}
FACTORIES = """
import torch
from torch import nn
from tests.doctor import models


def wrong():
    return models.wrapped(lambda: nn.Dropout(0.5), preserve_rng_state=False), models.batch()


def right():
    return models.wrapped(lambda: nn.Dropout(0.5))


def language_model():
    from tests.models.small import llama

    return llama()


def text():
    return "no model"
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "factories_of_the_doctor.py").write_text(FACTORIES)
    (tmp_path / "config.json").write_text(json.dumps(MODELS["llama-3-8b"] | SMALL))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_a_model_of_ones_own(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--config", "factories_of_the_doctor:wrong"]) == 3
    assert "layers.1.piece" in capsys.readouterr().out
    assert main(["doctor", "--config", "factories_of_the_doctor:wrong", "--json"]) == 3
    found = printed(capsys)["findings"]
    assert {(f["severity"], f["place"]) for f in found} == {("error", "layers.1.piece")}
    assert main(["doctor", "--config", "factories_of_the_doctor:right", "--json"]) == 0
    assert printed(capsys) == {"findings": [], "certificate": "No certificate: without a batch nothing runs."}
    call = ["doctor", "--config", "factories_of_the_doctor:language_model", "--batch", "2", "--seq", "9", "--json"]
    assert main(call) == 0
    assert printed(capsys)["certificate"].startswith("Certificate: loss, 21 gradients")


@pytest.mark.parametrize("lora", [None, 2])
@pytest.mark.parametrize("who", ["none", "hugging-face", "ckptfused"])
def test_a_configuration(here: Path, who: str, lora: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["doctor", "--config", "config.json", "--seq", "2", "--checkpoint", who, "--json"]
    assert main([*call, *([] if lora is None else ["--lora", str(lora)])]) == 0
    found = printed(capsys)
    assert "on the meta device" in found["certificate"]
    short = any("with sequences of 2 tokens" in f["text"] for f in found["findings"])
    assert short == (who != "none")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("nowhere", "--config: expected llama-3-8b"),
        ("nowhere_at_all:model", "--config: expected module:factory, got 'nowhere_at_all:model'"),
        ("factories_of_the_doctor:nothing", "has no attribute 'nothing'"),
        ("factories_of_the_doctor:text", "expected factories_of_the_doctor:text to return a model"),
    ],
)
def test_mistakes_are_said(here: Path, config: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--config", config]) == 1
    err = capsys.readouterr().err
    assert err.startswith("ckptfused doctor: ") and message in err


def test_the_help_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in ("module:factory", "--seq", "--lora", "--json", "Exit status 3: something is an error"):
        assert words in text

"""`python -m ckptfused layer`: what is read off a layer, or the line that does not fit."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

from ckptfused.cli import main
from ckptfused.cli.layer import derived

BLOCKS = """
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(24, 8)
            self.drop = nn.Dropout(0.1)

        def forward(self, x):
            return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))

    class Gated(Block):
        def forward(self, x):
            y = self.down(F.gelu(self.up(self.norm(x))))
            return x + y * x.sigmoid()

    def fits():
        return nn.Sequential(Block(), Block(), Block()), torch.zeros(2, 6, 8)

    def neither():
        return nn.Sequential(Block(), Gated(), Gated()), torch.zeros(2, 6, 8)

    def one():
        return Block(), torch.zeros(2, 6, 8)
"""


def printed(
    factory: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> tuple[int, str]:
    (tmp_path / "blocks_of_layer.py").write_text(textwrap.dedent(BLOCKS))
    monkeypatch.chdir(tmp_path)
    status = main(["layer", "--config", f"blocks_of_layer:{factory}", *options])
    return status, capsys.readouterr().out


def test_a_layer_is_read_and_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    status, out = printed("fits", ["--calls"], tmp_path, monkeypatch, capsys)
    assert status == 0
    assert "0 and 2 more alike: Block, 6 calls" in out
    assert "blocks_of_layer.py:13  gelu -> [2, 5, 24]  [activation]" in out
    assert "reads as halves=ffn ffn.act=gelu ffn.hidden=24 ffn.pre=layernorm ffn.p_res=0.1" in out
    assert "proved: the result and 7 gradients" in out


def test_the_first_call_that_does_not_fit_has_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    status, out = printed("neither", ["--calls"], tmp_path, monkeypatch, capsys)
    assert status == 3
    assert "> " in out and "blocks_of_layer.py:18: no rule takes mul of [2, 5, 8], [2, 5, 8]" in out


def test_a_block_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    status, out = printed("one", [], tmp_path, monkeypatch, capsys)
    assert status == 0 and "the model: Block" in out and "gelu" not in out.split("reads as")[0]


def test_a_model_that_fills_a_cache() -> None:
    """Its layers are read as they are called in training, where an empty cache is none."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
    model = transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**sizes, use_cache=True)).train()
    found = derived(model, {"input_ids": torch.zeros(1, 8, dtype=torch.int64)})
    assert len(found) == 1 and found[0][2].proof is not None, found[0][2].why


def test_a_configuration_without_data(capsys: pytest.CaptureFixture) -> None:
    """Its model is on the meta device, where transformers asks what position ids hold."""
    pytest.importorskip("transformers")
    assert main(["layer", "--config", "llama-3-8b"]) == 0
    out = capsys.readouterr().out
    assert "model.layers.0 and 31 more alike: LlamaDecoderLayer" in out and "attn.rope=half" in out

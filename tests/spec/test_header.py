"""What C++ has of the table: the headers in the repository are what the command writes, and C++ reads by them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckptfused.spec import ACTIVATIONS, AUX_NAMES, COEFFICIENTS, KEEP_NAMES, BlockSpec, FFNSpec, param_names
from ckptfused.spec.header import ROOT, headers


@pytest.mark.parametrize("path", headers(), ids=lambda path: path.name)
def test_the_header_is_what_the_command_writes(path: Path) -> None:
    assert path.read_text() == headers()[path], "run `make spec-header`"


def test_the_command_runs_before_a_build() -> None:
    code = "import sys, spec.header; sys.exit(any(name in sys.modules for name in ('torch', 'ckptfused')))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT / "ckptfused", check=True)


def forward(words: str) -> torch.Tensor:
    spec = BlockSpec(ffn=FFNSpec("relu", 4))
    params = [None] * len(param_names(spec))
    params[param_names(spec).index("ffn.up_w")] = torch.ones(4, 3)  # type: ignore[call-overload]
    params[param_names(spec).index("ffn.down_w")] = torch.ones(3, 4)  # type: ignore[call-overload]
    text = f"halves=ffn ffn.hidden=4 {words}"
    return torch.ops.ckptfused.ffn_block_fwd(torch.ones(1, 2, 3), params, [None] * len(AUX_NAMES), None, text, True)[0]


def test_words_reach_their_fields() -> None:
    assert forward("ffn.act=relu").tolist() == [[[13.0] * 3] * 2]
    assert forward("ffn.act=relu ffn.m=0.5").tolist() == [[[7.0] * 3] * 2]
    assert forward("ffn.act=relu2").tolist() == [[[37.0] * 3] * 2]
    assert forward(f"ffn.act=relu keep={'+'.join(KEEP_NAMES[4:5])} compute=float32").shape == (1, 2, 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ffn.act=relu ffn.colour=red", "unknown spec key 'ffn.colour'"),
        ("ffn.act=relu hidden=4", "unknown spec key 'hidden'"),
        ("ffn.act=relu attn.act=relu", "unknown spec key 'attn.act'"),
        ("ffn.act=relu keep=mid+colour", "unknown keep name 'colour'"),
        ("ffn.act=relu compute=int8", "unknown compute type 'int8'"),
        ("ffn.act=relu parallel=2", "spec expects 0 or 1, got '2'"),
        ("ffn.act=relu ffn.m=one", "spec expects a number, got 'one'"),
        ("ffn.act=relu ffn.lora=q:1:1.0:0.0", "unknown target 'q'"),
        ("ffn.act=tanh", "unknown activation 'tanh'"),
        ("", "unknown activation ''"),
        ("ffn.act=relu ffn", "'ffn' is not key=value"),
    ],
)
def test_cpp_refuses(words: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        forward(words)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_the_op_knows_every_activation(act: str) -> None:
    u = torch.ones(2, 3)
    h = torch.empty_like(u)
    coefficients = torch.ones(COEFFICIENTS[act]) if act in COEFFICIENTS else None
    torch.ops.ckptfused.activation_fwd(u, u, None, h, act, 0.0, 2, 3, 0, 0, [], coefficients)
    assert torch.isfinite(h).all()
    with pytest.raises(RuntimeError, match="act: expected one of relu, gelu, .* got tanh"):
        torch.ops.ckptfused.activation_fwd(u, u, None, h, "tanh", 0.0, 2, 3, 0, 0, [])

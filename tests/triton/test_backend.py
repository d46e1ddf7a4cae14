"""The choice of an attention kernel."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest
import torch

from ckptfused.triton.backend import Shape, attention_backend
from ckptfused.triton.configs import BLOCK_D, OPTION_CLASSES, SHARED, STAGES, attention_config, block_d, device_class
from ckptfused.triton.problem import GAP, make_problem

PLAIN = Shape(special=(), dtype=torch.bfloat16, head_dim=128, empty=False)


@pytest.mark.parametrize(
    ("change", "override", "expected"),
    [
        ({}, None, "flash"),
        ({}, "triton", "triton"),
        ({}, "cudnn", "cudnn"),
        ({"head_dim": 256}, "cudnn", "flash"),
        ({"special": ("masks",)}, None, "triton"),
        ({"special": ("masks",)}, "flash", "triton"),
        ({"dtype": torch.float32}, "cudnn", "triton"),
        ({"head_dim": 100}, None, "triton"),
        ({"empty": True}, "flash", "triton"),
    ],
)
def test_choice(change: dict[str, object], override: str | None, expected: str) -> None:
    name, reason = attention_backend(replace(PLAIN, **change), (9, 0), override)  # type: ignore[arg-type]
    assert name == expected
    assert reason


@pytest.mark.parametrize(
    ("change", "special"),
    [
        ({}, ()),
        ({"mask": torch.ones(5, 5, dtype=torch.bool), "mask_kind": "keep"}, ("masks",)),
        ({"padding": torch.ones(1, 5, dtype=torch.bool), "padding_kind": "drop"}, ("padding",)),
        ({"cu_seqlens": torch.tensor([0, 2, 5])}, ("packed sequences",)),
        ({"window": 3, "softcap": 2.0}, ("window", "soft cap")),
        ({"window": 5}, ()),  # covers every key
        ({"p": 0.1, "rng_state": torch.zeros(2, dtype=torch.int64)}, ("dropout",)),
        ({"q": torch.ones(1, 1, 3, 8)}, ("unequal lengths",)),
    ],
)
def test_what_is_special_in_a_call(change: dict[str, object], special: tuple[str, ...]) -> None:
    arguments: dict[str, object] = dict.fromkeys(("q", "k", "v"), torch.ones(1, 1, 5, 8))
    arguments |= dict.fromkeys(("mask", "padding", "cu_seqlens", "rng_state"))
    arguments |= {"mask_kind": "none", "padding_kind": "none", "scale": 1.0, "causal": True}
    arguments |= {"window": 0, "softcap": 0.0, "p": 0.0} | change
    assert Shape.of(make_problem("op", **arguments)).special == special  # type: ignore[arg-type]


def test_old_devices() -> None:
    assert attention_backend(PLAIN, (7, 5), None)[0] == "triton"


def test_wrong_override_is_refused() -> None:
    code = "import os; os.environ['CKPTFUSED_ATTENTION'] = 'fast'; import ckptfused.triton.backend"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "CKPTFUSED_ATTENTION: expected one of triton, flash, cudnn, got 'fast'" in run.stderr


def test_importing_needs_no_triton() -> None:
    """Without Triton all is registered just the same, and what needs it says so."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import importlib.util, torch\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'triton' else find(name, *rest)\n"
        "import ckptfused\n"
        "import ckptfused.triton.attention as attention, ckptfused.triton.register as register\n"
        "assert register.register() == (torch.version.cuda is not None)\n"
        "torch.cuda.get_device_capability = lambda device: (9, 0)\n"
        "q = torch.ones(1, 1, 4, 8)\n"
        "problem = attention.make_problem('op', q, q, q, *[None] * 4, 'none', 'none', 1.0, True, 0, 0.0, 0.0)\n"
        "attention._backend('op', problem)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "op: this call needs Triton, which is not installed (torch.float32:" in run.stderr


def test_one_gap() -> None:
    pytest.importorskip("triton")
    from ckptfused.triton import attention_bwd

    assert attention_bwd.GAP.value == GAP


def test_there_is_a_tile_for_everything() -> None:
    for capability in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)):
        assert device_class(capability) in SHARED
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            for head_dim in (1, 7, *BLOCK_D, 100, 192):
                for stage in STAGES:
                    for dropout, options in product((False, True), OPTION_CLASSES):
                        c = attention_config(stage, dtype, head_dim, dropout, capability, options)
                        assert c.block_n % 8 == 0 and c.block_m <= GAP
                        assert not c.piece or block_d(head_dim) % c.piece == 0
                assert block_d(head_dim) in BLOCK_D

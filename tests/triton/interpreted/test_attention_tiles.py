"""The attention kernels with the tiles that a GPU gets, against the materialised reference in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ckptfused.triton import launch
from ckptfused.triton.configs import Config, block_d
from ckptfused.triton.problem import Problem
from tests.ops.attention_calls import Case, make_call
from tests.triton.kernel_calls import P, check, failures, problem, run


@pytest.mark.parametrize("capability", [(9, 0), (8, 0), (8, 6)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_real_tiles(capability: tuple[int, int], head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tile sizes are those that a GPU gets."""
    case = Case(batch=1, heads=2, kv_heads=1, tokens=130, head_dim=head_dim, causal=True, p=P, dtype=torch.bfloat16)
    monkeypatch.setattr(launch, "_config", lambda stage, a: launch._tile(stage, a, capability))
    check(case)


NARROW = Case(batch=1, heads=2, kv_heads=1, tokens=67, head_dim=24, p=P, dtype=torch.bfloat16)


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        replace(NARROW, mask="add", causal=True),
        replace(NARROW, head_dim=8, p=0.0, window=20, softcap=2.0, mask="keep"),
        replace(NARROW, head_dim=32, padding="keep", window=20, causal=True),
        replace(NARROW, head_dim=96, mask="drop", padding="add"),
        replace(NARROW, head_dim=48, packed=(0, 10, 67)),
        replace(NARROW, head_dim=192, p=0.0, softcap=2.0),
    ],
    ids=lambda c: c.id,
)
def test_real_tiles_of_options(capability: tuple[int, int], case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tile sizes are those of masks, of other options, and of heads that do not fill a padded row."""
    monkeypatch.setattr(launch, "_config", lambda stage, a: launch._tile(stage, a, capability))
    check(case)


WIDE = Case(batch=1, heads=2, kv_heads=1, tokens=35, head_dim=256, p=P, dtype=torch.float32)


@pytest.mark.parametrize(
    "case",
    [
        replace(WIDE, causal=True),
        replace(WIDE, head_dim=100, window=9, softcap=2.0, mask="add", padding="drop"),
        replace(WIDE, dtype=torch.float64, head_dim=200, packed=(0, 10, 35)),
    ],
    ids=lambda c: c.id,
)
def test_wide_rows_in_pieces(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact types multiply rows of more than 64 a piece at a time; the replay of o has forward's bits."""
    taken: list[Config] = []

    def tile(stage: str, a: Problem) -> Config:
        taken.append(launch._tile(stage, a, (8, 0)))
        return taken[-1]

    monkeypatch.setattr(launch, "_config", tile)
    call = make_call(case)
    got = run(call)
    assert all(map(torch.equal, launch.launch_forward(problem(call, "cpu")), got[:2]))
    assert all(0 < c.piece <= block_d(case.head_dim) // 2 for c in taken) and len(taken) == 4
    assert not failures(case, got, call)

"""Shapes that the benchmarks run. One place, so that results stay comparable."""

from __future__ import annotations

from dataclasses import dataclass

from ckptfused.cli.models import LayerShape


@dataclass(frozen=True)
class Case:
    """A stack of layers and the batch it sees."""

    name: str
    shape: LayerShape
    batch: int
    tokens: int


LLAMA = Case(
    "llama-4x1024",
    LayerShape(d_model=1024, nhead=16, dim_feedforward=2752, layers=4, residual_dropout=0.1),
    batch=4,
    tokens=512,
)
SMALL = Case(
    "small-2x256",
    LayerShape(d_model=256, nhead=4, dim_feedforward=688, layers=2, residual_dropout=0.1),
    batch=2,
    tokens=128,
)
# Of a GPU's measurements, and of their rehearsal on a CPU.
LLAMA_3_8B = Case(
    "llama-3-8b", LayerShape(4096, 32, 14336, layers=1, num_kv_heads=8, rope_theta=5e5), batch=2, tokens=8192
)
TINY = Case("tiny", LayerShape(64, 4, 96, layers=1, num_kv_heads=2), batch=2, tokens=32)
CASES = {case.name: case for case in (LLAMA, SMALL)}

# The goals for LLAMA: step time of "ckptfused inputs" over that of the variant named, at most.
GOALS = {
    "bfloat16": {"plain": 0.85, "torch.utils.checkpoint": 0.70},
    "float32": {"plain": 1.10, "torch.utils.checkpoint": 0.85},
}

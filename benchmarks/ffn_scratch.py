"""Peak memory and time of a block's backward under limits of its FFN's hidden-wide scratch.

One Llama-style block that saves its input only. Gradients differ in bits from limit to limit, as sums over tiles do,
and are checked against float64 first. The limits take turns. Writes
benchmarks/results/ffn-scratch-<tokens>x<width>-<dtype>[-<label>].json and .md.

    python benchmarks/ffn_scratch.py --dtype float32 --dtype bfloat16
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks import environment
from benchmarks.checks import worst_error
from benchmarks.commands import command_line, interleaved, page, times, write
from benchmarks.memory import memory_of
from benchmarks.step_time import summary, take_turns
from ckptfused import cost
from ckptfused.functional import block
from ckptfused.spec import AttentionSpec, BlockSpec, FFNSpec, param_shapes

LIMITS = (1024, 64, 16, 4)  # MiB; the first one cuts nothing
TOKENS, WIDTH, HIDDEN, HEADS = 8192, 1024, 2816, 8
ATTENTION = AttentionSpec(HEADS, HEADS, WIDTH // HEADS, pre="rmsnorm", causal=True)
SPEC = BlockSpec(ATTENTION, FFNSpec("swiglu", HIDDEN, pre="rmsnorm"))


def tensors(spec: BlockSpec, tokens: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """x, the gradient that comes back, and parameters."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (std * torch.randn(shape, generator=generator)).to(dtype)

    params = {
        name: (normal(*shape, std=shape[-1] ** -0.5) if len(shape) == 2 else torch.ones(shape, dtype=dtype))
        for name, (shape, _) in param_shapes(spec, WIDTH).items()
        if not name.endswith("_b")
    }
    return normal(1, tokens, WIDTH).requires_grad_(), normal(1, tokens, WIDTH), {
        name: t.requires_grad_() for name, t in params.items()
    }  # fmt: skip


def gradients(spec: BlockSpec, x: Tensor, dy: Tensor, params: dict[str, Tensor]) -> dict[str, Tensor]:
    leaves = {"x": x, **params}
    found = torch.autograd.grad(block(x, params, spec), list(leaves.values()), dy)
    return dict(zip(leaves, found, strict=True))


def check(dtype: torch.dtype, seed: int) -> str:
    """Raises unless every limit's gradients are right, as `checks.worst_error`; returns what was shown."""
    x, dy, params = tensors(SPEC, 256, dtype, seed)

    def double(t: Tensor) -> Tensor:
        return t.detach().double().requires_grad_()

    exact = gradients(SPEC, double(x), double(dy), {name: double(t) for name, t in params.items()})
    whole, worst = gradients(SPEC, x, dy, params), 0.0
    for limit in LIMITS[1:]:
        cut = replace(SPEC, scratch=(limit << 20) * 256 // TOKENS)
        worst = max(worst, worst_error(exact, whole, gradients(cut, x, dy, params), dtype))
    return f"gradients in tiles at most {worst:.2f} of the allowed error against float64"


def measure(dtype_name: str, budget: float, seed: int) -> dict[str, Any]:
    """Checks, then measures each limit's backward."""
    dtype = getattr(torch, dtype_name)
    checked = check(dtype, seed)
    x, dy, params = tensors(SPEC, TOKENS, dtype, seed)
    leaves = [x, *params.values()]
    steps, peaks, tiles = {}, {}, {}
    for limit in LIMITS:
        spec = replace(SPEC, scratch=limit << 20)
        y = block(x, params, spec)
        steps[str(limit)] = partial(torch.autograd.grad, y, leaves, dy, retain_graph=True)
        peaks[str(limit)] = memory_of(steps[str(limit)]).peak
        tiles[str(limit)] = cost.ffn_tiles(TOKENS, WIDTH, HIDDEN, True, dtype.itemsize, spec.scratch)
    times = {limit: summary(seconds) for limit, seconds in take_turns(steps, budget).items()}
    return {
        "case": f"ffn-scratch-{TOKENS}x{WIDTH}",
        "dtype": dtype_name,
        "shape": {"tokens": TOKENS, "width": WIDTH, "hidden": HIDDEN, "heads": HEADS},
        "check": checked,
        "seconds": times,
        "peak_bytes": peaks,
        "tiles": tiles,
        "gradient_bytes": sum(t.nbytes for t in leaves),
        "environment": environment.describe(),
    }


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    shape, dtype = result["shape"], result["dtype"]
    lines = [
        f"# {result['case']}, {dtype}",
        "",
        f"Backward of one pre-norm block, C {shape['width']}, F {shape['hidden']}, SwiGLU, {shape['heads']} heads, "
        f"{shape['tokens']} tokens, that saved its input. Of each peak {result['gradient_bytes'] / 2**20:.0f} MiB are "
        "its gradients.",
        "",
        "| scratch | tiles of | peak MiB | median s | p20 | p80 | time |",
        "|---|---|---|---|---|---|---|",
    ]
    first = result["seconds"][str(LIMITS[0])]["median"]
    for limit, row in result["seconds"].items():
        rows, cols = result["tiles"][limit]
        whole = (rows, cols) == (shape["tokens"], shape["hidden"])
        tiles, peak = "one piece" if whole else f"{rows} × {cols}", result["peak_bytes"][limit] / 2**20
        lines.append(f"| {limit} MiB | {tiles} | {peak:,.0f} | {times(row)} | {row['median'] / first:.2f}× |")
    return page(lines, result, f"{interleaved(result, 'backwards')} Checked first: {result['check']}.")


def main() -> None:
    parser = command_line(__doc__, 60.0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), action="append", help="default: both")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for dtype in arguments.dtype or ("float32", "bfloat16"):
        result = measure(dtype, arguments.budget, arguments.seed)
        write(result, markdown, arguments, result["case"], dtype)


if __name__ == "__main__":
    main()

"""Attention forward and backward on a GPU: ours against PyTorch's kernels, and the rate of cuBLAS.

    python benchmarks/gpu_attention.py --seconds 30

bfloat16, B 4, T 4096, 32 heads of 128, causal; dropout 0.1 and none. Two heads are compared with float32 first.
PyTorch's dropout cannot be compared element by element with anything: it takes no seed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import ckptfused  # noqa: F401  (registers the ops)
from benchmarks.gpu_timing import Clock, Goal, arguments, expect_close, write
from benchmarks.tables import goal_table, table

OPS, ATEN = torch.ops.ckptfused, torch.ops.aten
DTYPE, P = torch.bfloat16, 0.1
LIMIT = 0.02  # of ||o|| and ||d||: probabilities and their gradients are rounded to bfloat16 between the products
PRODUCTS = {"qkv": (4096, 6144), "o": (4096, 4096), "gate/up": (4096, 28672), "down": (14336, 4096)}


@dataclass(frozen=True)
class Sizes:
    batch: int = 4
    heads: int = 32
    tokens: int = 4096
    dim: int = 128

    @property
    def flops(self) -> float:
        """Of a causal forward; a backward makes five products where it makes two."""
        return 2 * self.batch * self.heads * self.tokens**2 * self.dim


TINY = Sizes(2, 2, 64, 16)


@dataclass(frozen=True)
class Pass:
    """A forward, and a backward from what the last forward left."""

    forward: Callable[[], list[Tensor]]
    backward: Callable[[list[Tensor]], tuple[Tensor, ...]]

    def both(self) -> None:
        self.backward(self.forward())


class Case:
    """q, k, v, do as a block has them: [B, H, T, D] views of [B, T, H, D]."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        self.sizes = sizes
        shape = (sizes.batch, sizes.tokens, sizes.heads, sizes.dim)
        self.q, self.k, self.v, self.do = (
            torch.randn(shape, device=device).to(DTYPE).transpose(1, 2) for _ in range(4)
        )  # fmt: skip
        self.scale = sizes.dim**-0.5
        self.state = OPS.rng_state(self.q, 0)

    def ours(self, p: float) -> Pass:
        qkv = (self.q, self.k, self.v)
        how = (None, None, None, self.state if p else None, "none", "none", self.scale, True, 0, 0.0, p)
        return Pass(
            lambda: list(OPS.attention_fwd(*qkv, *how)),
            lambda kept: OPS.attention_bwd(self.do, *qkv, *kept, *how),
        )

    def flash(self, p: float) -> Pass:
        """PyTorch's flash kernel."""
        qkv = (self.q, self.k, self.v)
        forward, backward = ATEN._scaled_dot_product_flash_attention, ATEN._scaled_dot_product_flash_attention_backward

        def run_backward(kept: list[Any]) -> tuple[Tensor, ...]:
            o, lse, lengths_q, lengths_k, most_q, most_k, seed, offset, _ = kept
            rest = (lengths_q, lengths_k, most_q, most_k, p, True, seed, offset)
            return backward(self.do, *qkv, o, lse, *rest, scale=self.scale)

        return Pass(lambda: list(forward(*qkv, p, True, False, scale=self.scale)), run_backward)

    def cudnn(self, p: float) -> Pass:
        """cuDNN's kernel, as PyTorch calls it."""
        qkv = (self.q, self.k, self.v)
        forward, backward = ATEN._scaled_dot_product_cudnn_attention, ATEN._scaled_dot_product_cudnn_attention_backward

        def run_backward(kept: list[Any]) -> tuple[Tensor, ...]:
            o, lse, lengths_q, lengths_k, most_q, most_k, seed, offset, _ = kept
            rest = (seed, offset, None, lengths_q, lengths_k, most_q, most_k, p, True)
            return backward(self.do, *qkv, o, lse, *rest, scale=self.scale)

        return Pass(lambda: list(forward(*qkv, None, True, p, True, False, scale=self.scale)), run_backward)

    def check(self, p: float) -> dict[str, float]:
        """Errors of our o, dq, dk, dv on the first two heads, by norm."""
        ours = self.ours(p)
        kept = ours.forward()
        found = [kept[0], *ours.backward(kept)]
        q, k, v = (t[:1, :2].float().requires_grad_() for t in (self.q, self.k, self.v))
        length = self.sizes.tokens
        visible = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        probs = (q @ k.mT * self.scale).masked_fill(~visible, -torch.inf).softmax(-1)
        if p:
            shape = [self.sizes.batch, self.sizes.heads, length, length]
            keep = OPS.dropout_mask(shape, p, self.state, 0)[:1, :2]
            probs = torch.where(keep, probs * (65536 / (65536 - round(p * 65536))), 0.0)
        o = probs @ v
        right = [o.detach(), *torch.autograd.grad(o, (q, k, v), self.do[:1, :2].float())]
        names = ("o", "dq", "dk", "dv")
        return {
            name: expect_close(f"attention, p {p}, {name}", f[:1, :2], r, LIMIT)
            for name, f, r in zip(names, found, right, strict=True)
        }


def measure(case: Case, p: float, clock: Clock, seconds: float) -> dict[str, Any]:
    """Forward, backward and both, of every kernel that runs here."""
    errors = case.check(p)
    passes, missing = {"ckptfused": case.ours(p)}, {}
    for name in ("flash", "cudnn") if clock.device == "cuda" else ():
        try:
            candidate: Pass = getattr(case, name)(p)
            candidate.both()
            passes[name] = candidate
        except (RuntimeError, TypeError, ValueError) as error:
            missing[name] = str(error).splitlines()[0]
    kept = {name: one.forward() for name, one in passes.items()}
    calls: dict[str, Callable[[], object]] = {}
    for name, one in passes.items():
        calls[f"{name} forward"] = one.forward
        calls[f"{name} backward"] = lambda one=one, name=name: one.backward(kept[name])  # type: ignore[misc]
        calls[name] = one.both
    times = clock.compare(calls, seconds, rounds=20)
    rates = {
        name: (1.0 if name.endswith("forward") else 2.5 if name.endswith("backward") else 3.5)
        * case.sizes.flops / value.median / 1e9
        for name, value in times.items()
    }  # fmt: skip
    return {
        "p": p,
        "errors": errors,
        "milliseconds": {name: vars(value) for name, value in times.items()},
        "TFLOP/s": rates,
        "missing": missing,
    }


def product_rates(device: str, clock: Clock, seconds: float, rows: int, shrink: int) -> dict[str, Any]:
    """cuBLAS, on random numbers, for the products of a Llama-3-8B layer and a large square one."""
    found = {}
    shapes = {name: (rows, c // shrink, k // shrink) for name, (c, k) in PRODUCTS.items()}
    shapes["8192 cubed"] = (8192 // shrink,) * 3
    for name, (n, c, k) in shapes.items():
        a, b = torch.randn(n, c, device=device).to(DTYPE), torch.randn(k, c, device=device).to(DTYPE)
        out = torch.empty(n, k, dtype=DTYPE, device=device)
        time = clock.compare({"mm": lambda a=a, b=b, out=out: torch.mm(a, b.t(), out=out)}, seconds / len(shapes), 20)  # type: ignore[misc]
        found[name] = {"shape": [n, c, k], **vars(time["mm"]), "TFLOP/s": 2 * n * c * k / time["mm"].median / 1e9}
    return found


def goals_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    times = {name: value["median"] for name, value in result["milliseconds"].items()}
    if not result["p"] or "flash" not in times:
        return []
    speed = times["flash"] / times["ckptfused"]
    return [Goal("attention with dropout, flash's time over ours", speed, 1.0, True).row()]


def main() -> None:
    options = arguments(__doc__)
    torch.manual_seed(0)
    clock = Clock(options.device)
    sizes, shrink = (TINY, 64) if options.tiny else (Sizes(), 1)
    products = product_rates(options.device, clock, options.seconds / 6, 16384 // shrink, shrink)
    case = Case(sizes, options.device)
    found: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    goals: list[dict[str, Any]] = []
    for p in (P, 0.0):
        try:
            found.append(measure(case, p, clock, options.seconds * 5 / 12))
        except (RuntimeError, SystemExit) as error:
            failed[f"p {p}"] = str(error)
            print(f"p {p}: {error}", flush=True)
        else:
            goals += goals_of(found[-1])
        result = {"sizes": vars(sizes), "dtype": "bfloat16", "attention": found, "cublas": products}
        path = write(options, "attention", {**result, "failed": failed, "goals": goals})
    rows: list[list[object]] = [
        [f"dropout {r['p']}", name, *(f"{t[key]:.3f}" for key in ("median", "p20", "p80")), f"{r['TFLOP/s'][name]:.0f}"]
        for r in found
        for name, t in r["milliseconds"].items()
    ]
    print(table(["attention", "kernel", "ms", "p20", "p80", "TFLOP/s"], rows))
    for r in found:
        for name, why in r["missing"].items():
            print(f"dropout {r['p']}: {name} was not measured: {why}")
    print(
        table(
            ["cuBLAS", "ms", "TFLOP/s"], [[n, f"{r['median']:.3f}", f"{r['TFLOP/s']:.0f}"] for n, r in products.items()]
        )
    )
    print(goal_table(goals))
    print(f"written: {path}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

"""Attention forward and backward on a GPU: ours against PyTorch's kernels, and the rate of cuBLAS.

    python -m benchmarks.gpu.attention --seconds 30

bfloat16, B 4, T 4096, 32 heads of 128, causal; dropout 0.1 and none. Two heads are compared with float32 first.
PyTorch's dropout cannot be compared element by element with anything: it takes no seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.differences import expect_close
from benchmarks.gpu.timing import Clock, Goal, Times, parser, path_of, write
from benchmarks.tables import goal_table, table
from ckptfused import cost

OPS, ATEN = torch.ops.ckptfused, torch.ops.aten
DTYPE, P = torch.bfloat16, 0.1
LIMIT = 0.02  # of ||o|| and ||d||: probabilities and their gradients are rounded to bfloat16 between the products
TILED = 256 << 20  # bytes of scratch
WEIGHTS = {"qkv": (4096, 6144), "o": (4096, 4096), "gate/up": (4096, 28672), "down": (14336, 4096)}


@dataclass(frozen=True)
class Sizes:
    batch: int = 4
    heads: int = 32
    tokens: int = 4096
    dim: int = 128

    @property
    def flops(self) -> float:
        """FLOPs of a causal forward; a backward makes five products where it makes two."""
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


def measure(
    case: Case, p: float, clock: Clock, seconds: float, after: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """Forward, backward and both, of every kernel that runs here; after each round, what there is so far."""
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

    def row(times: dict[str, Times]) -> dict[str, Any]:
        rates = {
            name: (1.0 if name.endswith("forward") else 2.5 if name.endswith("backward") else 3.5)
            * case.sizes.flops / value.median / 1e9
            for name, value in times.items()
        }  # fmt: skip
        milliseconds = {name: vars(value) for name, value in times.items()}
        return {"p": p, "errors": errors, "milliseconds": milliseconds, "TFLOP/s": rates, "missing": missing}

    return row(clock.compare(calls, seconds, rounds=20, after=lambda times: after(row(times))))


Product = tuple[int, int, int, torch.dtype]  # [n, c] x [c, k], and the type of the result


def products(rows: int, shrink: int) -> dict[str, Product]:
    """Products of a Llama-3-8B layer, of its FFN's tiles under a scratch of 256 MiB, with float32 sums too, and a
    square one.
    """
    found: dict[str, Product] = {name: (rows, c // shrink, k // shrink, DTYPE) for name, (c, k) in WEIGHTS.items()}
    width, hidden = WEIGHTS["gate/up"][0], WEIGHTS["down"][0]
    _, columns = cost.ffn_tiles(rows * shrink, width, hidden, True, DTYPE.itemsize, TILED, "cuda")
    columns, width = columns // shrink, width // shrink
    for name, dtype in (("", DTYPE), (", float32", torch.float32)):
        found |= {
            f"tile's gate/up{name}": (rows, width, 2 * columns, dtype),
            f"tile's dx{name}": (rows, 2 * columns, width, dtype),
            f"tile's dW{name}": (2 * columns, rows, width, dtype),
        }
    return found | {"8192 cubed": (8192 // shrink, 8192 // shrink, 8192 // shrink, DTYPE)}


def multiplied(n: int, c: int, k: int, dtype: torch.dtype, device: str) -> Callable[[], Tensor]:
    """A product of random bfloat16 matrices."""
    a, b = torch.randn(n, c, device=device).to(DTYPE), torch.randn(k, c, device=device).to(DTYPE)
    if dtype == DTYPE:
        out = torch.empty(n, k, dtype=DTYPE, device=device)
        return lambda: torch.mm(a, b.t(), out=out)
    if device == "cpu":  # where no product of PyTorch's has a wider result than operands
        return lambda: torch.mm(a.to(dtype), b.t().to(dtype))
    return lambda: torch.mm(a, b.t(), out_dtype=dtype)


def product_rates(
    device: str, clock: Clock, seconds: float, shapes: dict[str, Product], after: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """cuBLAS on random numbers; after each, what there is so far."""
    found: dict[str, Any] = {}
    for name, (n, c, k, dtype) in shapes.items():
        time = clock.compare({"mm": multiplied(n, c, k, dtype, device)}, seconds / len(shapes), 20)["mm"]
        found[name] = {"shape": [n, c, k], **vars(time), "TFLOP/s": 2 * n * c * k / time.median / 1e9}
        after(found)
    return found


def goals_of(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Goals: with dropout, ours against PyTorch's flash kernel without; its own with dropout beside."""
    medians = {r["p"]: {name: t["median"] for name, t in r["milliseconds"].items()} for r in found}
    ours, calm = medians.get(P, {}).get("ckptfused"), medians.get(0.0, {}).get("flash")
    goals = [Goal("attention: flash without dropout over ours with", calm / ours, 0.85, True)] if ours and calm else []
    if ours and "flash" in medians[P]:
        goals.append(Goal("attention with dropout: flash over ours", medians[P]["flash"] / ours, 1.0, True))
    return [goal.row() for goal in goals]


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--once", action="store_true", help="ours with dropout once, for a profiler")
    options = words.parse_args()
    torch.manual_seed(0)
    sizes, shrink = (TINY, 64) if options.tiny else (Sizes(), 1)
    if options.once:
        Case(sizes, options.device).ours(P).both()
        return
    clock = Clock(options.device)
    found: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    rates: dict[str, Any] = {}

    def save(*more: dict[str, Any]) -> None:
        """After every round: if time runs out, what was measured stays."""
        now = [*found, *more]
        result = {"sizes": vars(sizes), "dtype": "bfloat16", "attention": now, "cublas": rates}
        write(options, "attention", {**result, "failed": failed, "goals": goals_of(now)})

    case = Case(sizes, options.device)
    for p in (P, 0.0):
        try:
            found.append(measure(case, p, clock, options.seconds / 3, save))
        except (RuntimeError, SystemExit) as error:
            failed[f"p {p}"] = str(error)
            print(f"p {p}: {error}", flush=True)
    shapes = products(16384 // shrink, shrink)

    def save_rates(now: dict[str, Any]) -> None:
        rates.update(now)
        save()

    product_rates(options.device, clock, options.seconds / 3, shapes, save_rates)
    save()
    show(found, rates)
    print(goal_table(goals_of(found)))
    print(f"written: {path_of(options, 'attention')}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def show(found: list[dict[str, Any]], rates: dict[str, Any]) -> None:
    rows: list[list[object]] = [
        [f"dropout {r['p']}", name, *(f"{t[key]:.3f}" for key in ("median", "p20", "p80")), f"{r['TFLOP/s'][name]:.0f}"]
        for r in found
        for name, t in r["milliseconds"].items()
    ]
    print(table(["attention", "kernel", "ms", "p20", "p80", "TFLOP/s"], rows))
    for r in found:
        for name, why in r["missing"].items():
            print(f"dropout {r['p']}: {name} was not measured: {why}")
    rows = [[name, r["shape"], f"{r['median']:.3f}", f"{r['TFLOP/s']:.0f}"] for name, r in rates.items()]
    print(table(["cuBLAS", "n, c, k", "ms", "TFLOP/s"], rows))


if __name__ == "__main__":
    main()

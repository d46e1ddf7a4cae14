"""The row kernels, each with eager PyTorch, what is right and the bytes to move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import ckptfused  # noqa: F401  (registers the ops)
from benchmarks.differences import expect_close
from benchmarks.ops import EPS, Op, Sizes, layer_norm, rms_norm, size, unset
from ckptfused.cli.models import rope_tables, rotate

OPS = torch.ops.ckptfused
DTYPE, P = torch.bfloat16, 0.1
SCALE = 65536 / (65536 - round(P * 65536))
How = Callable[[Any], Any]


def limit(dtype: torch.dtype) -> float:
    """The error that an op may have, relative to the norm: an ulp each for two roundings, and the sums inside."""
    return 4 * torch.finfo(dtype).eps


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up."""
    return F.silu(gate) * up


def summed_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """The loss of all rows, in float32."""
    return F.cross_entropy(logits.float(), target, reduction="sum")


NORMS: dict[str, Callable[..., Tensor]] = {"rmsnorm": rms_norm, "layernorm": layer_norm}


def rotated(given: list[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
    """Queries and keys [B, T, heads, D], turned by tables [T, D / 2]."""
    return [rotate(t.transpose(1, 2), cos, sin) for t in given]


class Make:
    """The ops to measure, made one at a time. how: in what way PyTorch's own runs, such as `torch.compile`."""

    def __init__(self, sizes: Sizes, device: str, dtype: torch.dtype = DTYPE, how: How = lambda plain: plain) -> None:
        self.sizes, self.device, self.dtype, self.how = sizes, device, dtype, how
        self._wide = torch.float64 if dtype == torch.float32 else torch.float32

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def wide(self, t: Tensor) -> Tensor:
        """A copy in a type whose errors do not show."""
        return t.detach().to(self._wide)

    def matrix(self) -> Tensor:
        return self.normal(self.sizes.rows, self.sizes.width)

    def _norm_forward(self, kind: str) -> Op:
        x, w = self.matrix(), self.normal(self.sizes.width)
        b = self.normal(self.sizes.width) if kind == "layernorm" else None
        y, norm = unset(x), NORMS[kind]

        def results() -> list[tuple[Tensor, Tensor]]:
            return [(y, norm(self.wide(x), self.wide(w), None if b is None else self.wide(b)))]

        plain = self.how(norm)
        return Op(lambda: OPS.norm_fwd(x, w, b, y, kind, EPS), lambda: plain(x, w, b), results, size(x, y))

    def _norm_backward(self, kind: str) -> Op:
        x, w, dy = self.matrix().requires_grad_(), self.normal(self.sizes.width).requires_grad_(), self.matrix()
        b = self.normal(self.sizes.width).requires_grad_() if kind == "layernorm" else None
        leaves = [x, w] if b is None else [x, w, b]
        plain, weight, norm = x.detach(), w.detach(), NORMS[kind]
        dx = unset(plain)
        grads = [torch.full((self.sizes.width,), torch.nan, device=self.device) for _ in leaves[1:]]
        chunks = OPS.grad_chunks(plain, *plain.shape, 0)
        partials = [grad.new_empty(chunks, self.sizes.width) for grad in grads]
        y = self.how(norm)(x, w, b)

        def eager() -> tuple[Tensor, ...]:
            return torch.autograd.grad(y, leaves, dy, retain_graph=True)

        def results() -> list[tuple[Tensor, Tensor]]:
            wide = [self.wide(leaf).requires_grad_() for leaf in leaves]
            right = torch.autograd.grad(norm(*wide), wide, self.wide(dy))
            return list(zip([dx, *grads], right, strict=True))

        def ours() -> None:
            OPS.norm_bwd(dy, plain, weight, None, dx, partials[0], partials[1] if b is not None else None, kind, EPS)
            OPS.sum_grads(partials, grads)

        return Op(ours, eager, results, size(dy, x, dx))

    def rms_norm_forward(self) -> Op:
        return self._norm_forward("rmsnorm")

    def layer_norm_forward(self) -> Op:
        return self._norm_forward("layernorm")

    def rms_norm_backward(self) -> Op:
        return self._norm_backward("rmsnorm")

    def layer_norm_backward(self) -> Op:
        return self._norm_backward("layernorm")

    def residual_dropout_norm(self) -> Op:
        """x + drop(f) and its RMSNorm; eager: dropout, add, norm."""
        x, f, w = self.matrix(), self.matrix(), self.normal(self.sizes.width)
        total, normed, state = unset(x), unset(x), OPS.rng_state(x, 0)
        shape = (self.sizes.width,)

        def ours() -> None:
            how = ("none", EPS, "rmsnorm", EPS, 1.0, P, 1)
            OPS.residual_fwd(x, f, state, None, None, w, None, total, normed, *how, [])

        def eager(x: Tensor, f: Tensor, w: Tensor) -> Tensor:
            return F.rms_norm(x + F.dropout(f, P), shape, w, EPS)

        def results() -> list[tuple[Tensor, Tensor]]:
            keep = OPS.dropout_mask(list(x.shape), P, state, 1)
            right = self.wide(x) + torch.where(keep, self.wide(f) * SCALE, 0.0)
            return [(total, right), (normed, F.rms_norm(self.wide(total), shape, self.wide(w), EPS))]

        plain = self.how(eager)
        return Op(ours, lambda: plain(x, f, w), results, size(x, f, total, normed))

    def residual_dropout_backward(self) -> Op:
        """The gradient of f through dropout; eager: a product with the scaled mask that it kept."""
        ds = self.matrix()
        df, state = unset(ds), OPS.rng_state(ds, 0)
        kept = OPS.dropout_mask(list(ds.shape), P, state, 1)
        plain = self.how(torch.ops.aten.native_dropout_backward)
        return Op(
            lambda: OPS.residual_bwd(ds, None, state, None, df, None, None, "none", EPS, 1.0, P, 1, []),
            lambda: plain(ds, kept, SCALE),
            lambda: [(df, torch.where(kept, self.wide(ds) * SCALE, 0.0))],
            size(ds, df),
        )

    def _gate_up(self) -> tuple[Tensor, Tensor]:
        """Columns of one product, as a block has them."""
        return tuple(self.normal(self.sizes.rows, 2 * self.sizes.hidden).chunk(2, 1))  # type: ignore[return-value]

    def glu_forward(self) -> Op:
        g, u = self._gate_up()
        h, hidden = torch.full(g.shape, torch.nan, dtype=self.dtype, device=self.device), self.sizes.hidden
        plain = self.how(swiglu)
        return Op(
            lambda: OPS.activation_fwd(g, u, None, h, "swiglu", 0.0, 2, hidden, 0, 0, []),
            lambda: plain(g, u),
            lambda: [(h, swiglu(self.wide(g), self.wide(u)))],
            size(g, u, h),
        )

    def glu_backward(self) -> Op:
        """h, dg, du from g, u, dh in one pass."""
        (g, u), hidden = self._gate_up(), self.sizes.hidden
        dh = self.normal(self.sizes.rows, hidden)
        h, (dg, du) = (
            unset(dh),
            torch.full((self.sizes.rows, 2 * hidden), torch.nan, dtype=self.dtype, device=self.device).chunk(2, 1),
        )
        leaves = [g.detach().requires_grad_(), u.detach().requires_grad_()]
        y = self.how(swiglu)(*leaves)

        def eager() -> object:
            """The backward alone, from what eager keeps: g, u, silu(g)."""
            return torch.autograd.grad(y, leaves, dh, retain_graph=True)

        def results() -> list[tuple[Tensor, Tensor]]:
            wide = [self.wide(t).requires_grad_() for t in (g, u)]
            right = swiglu(*wide)
            dgu = torch.autograd.grad(right, wide, self.wide(dh))
            return list(zip((h, dg, du), (right.detach(), *dgu), strict=True))

        return Op(
            lambda: OPS.activation_bwd(g, u, dh, None, h, dg, du, "swiglu", 0.0, 2, hidden, 0, 0, []),
            eager,
            results,
            size(g, u, dh, h, dg, du),
        )

    def _heads(self, count: int) -> tuple[Tensor, Tensor]:
        """Queries and keys [B, T, heads, D] as columns of one QKV product."""
        s = self.sizes
        qkv = self.normal(s.batch, s.tokens, (s.heads + 2 * s.kv_heads) * s.dim).unflatten(-1, (-1, s.dim))
        return qkv[:, :, : s.heads], qkv[:, :, s.heads : s.heads + s.kv_heads]

    def _tables(self) -> tuple[Tensor, Tensor]:
        cos, sin = rope_tables(self.sizes.tokens, self.sizes.dim, 5e5)
        return cos.to(self.device), sin.to(self.device)

    def _rope(self, sign: int) -> Op:
        """Queries and keys turned in place."""
        (q, k), (cos, sin) = self._heads(0), self._tables()
        given = [q.clone(), k.clone()]
        tables = cos.to(self.dtype), sign * sin.to(self.dtype)

        angles, how = (cos[None], sin[None]), ("none", EPS, "half", 0)

        def ours() -> None:
            if sign > 0:
                OPS.qk_fwd(q, None, None, *angles, q, *how, k, None, None, k)
            else:
                OPS.qk_bwd(q, q, None, *angles, q, None, None, *how, k, None, None, k)

        plain = self.how(rotated)

        def results() -> list[tuple[Tensor, Tensor]]:
            right = [rotate(self.wide(t).transpose(1, 2), cos, sign * sin).transpose(1, 2) for t in given]
            return list(zip((q, k), right, strict=True))

        return Op(ours, lambda: plain(given, *tables), results, 2 * size(q, k))

    def rope_forward(self) -> Op:
        return self._rope(1)

    def rope_backward(self) -> Op:
        return self._rope(-1)

    def qk_norm_rope_forward(self) -> Op:
        """RMSNorm of every head, then RoPE, into a new tensor."""
        (q, k), (cos, sin), dim = self._heads(0), self._tables(), self.sizes.dim
        w, tables, how = self.normal(dim), [t.to(self.dtype) for t in self._tables()], ("rmsnorm", EPS, "half", 0)
        out = [torch.full(t.shape, torch.nan, dtype=self.dtype, device=self.device) for t in (q, k)]

        def ours() -> None:
            OPS.qk_fwd(q, w, None, cos[None], sin[None], out[0], *how, k, w, None, out[1])

        def eager(given: list[Tensor], w: Tensor, cos: Tensor, sin: Tensor) -> object:
            return [rotate(F.rms_norm(t, (dim,), w, EPS).transpose(1, 2), cos, sin) for t in given]

        plain = self.how(eager)

        def results() -> list[tuple[Tensor, Tensor]]:
            wide = [F.rms_norm(self.wide(t), (dim,), self.wide(w), EPS).transpose(1, 2) for t in (q, k)]
            return [(y, rotate(t, cos, sin).transpose(1, 2)) for y, t in zip(out, wide, strict=True)]

        return Op(ours, lambda: plain([q, k], w, *tables), results, 2 * size(q, k), goal=None)

    def _cross_entropy(self, grad: bool) -> Op:
        """The gradient over the logits: with the loss in one pass, or from the lse that a forward left."""
        rows, classes = self.sizes.chunk, self.sizes.vocabulary
        logits, target = self.normal(rows, classes), torch.randint(classes, (rows,), device=self.device)
        given = logits.clone()
        loss, lse = (torch.full((rows,), torch.nan, device=self.device) for _ in range(2))
        how = (-100, 0.0, 1.0, 0.0, 0.0)

        def forward(grad: bool) -> None:
            OPS.cross_entropy_fwd(logits, target, None, loss, lse, None, grad, *how)

        leaf, plain = given.detach().requires_grad_(), self.how(summed_cross_entropy)

        def eager() -> Tensor:
            return torch.autograd.grad(plain(leaf, target), leaf)[0]

        def ours() -> None:
            if grad:
                forward(True)
            else:
                OPS.cross_entropy_bwd(logits, target, None, lse, None, classes, 0, *how)

        def results() -> list[tuple[Tensor, Tensor]]:
            wide = self.wide(given).requires_grad_()
            right = F.cross_entropy(wide, target, reduction="none")
            return [(loss, right.detach()), (logits, torch.autograd.grad(right.sum(), wide)[0])]

        if not grad:
            forward(False)
        return Op(ours, eager, results, size(logits, logits))

    def cross_entropy_forward(self) -> Op:
        return self._cross_entropy(True)

    def cross_entropy_backward(self) -> Op:
        return self._cross_entropy(False)


OP_NAMES = (
    *("rms_norm_forward", "rms_norm_backward", "layer_norm_forward", "layer_norm_backward"),
    *("residual_dropout_norm", "residual_dropout_backward", "glu_forward", "glu_backward"),
    *("rope_forward", "rope_backward", "qk_norm_rope_forward", "cross_entropy_forward", "cross_entropy_backward"),
)


def check(name: str, op: Op, dtype: torch.dtype = DTYPE) -> float:
    """Runs an op once; the largest error of its results. Raises where one is wrong."""
    op.ours()
    return max(expect_close(name, found, right, limit(dtype)) for found, right in op.results())

"""Calls of attention_fwd and attention_bwd for every kind of argument, and what they should give."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor

import ckptfused  # noqa: F401  (registers the ops)
from ckptfused.eager.attention import attention
from ckptfused.eager.philox import philox_mask

SEED, OFFSET = 0x1234567890ABCDEF, 5


@dataclass(frozen=True)
class Case:
    """One call of the ops."""

    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    tokens: int = 67
    head_dim: int = 20
    mask: str = "none"  # keep | drop | add | add-inf | add-<type> (its lowest) | shared | head | float64
    padding: str = "none"  # keep | drop | add
    packed: tuple[int, ...] = ()
    causal: bool = False
    window: int = 0
    softcap: float = 0.0
    p: float = 0.0
    dtype: torch.dtype = torch.float64
    scale: float = 0.3

    @property
    def id(self) -> str:
        default = Case()
        changed = {k: v for k, v in vars(self).items() if v != getattr(default, k)}
        return ",".join(f"{k}={v}".replace("torch.", "") for k, v in changed.items()) or "default"


@dataclass
class Call:
    """A case's tensors."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    rest: tuple[object, ...] = field(default=())

    def forward(self) -> tuple[Tensor, Tensor]:
        return torch.ops.ckptfused.attention_fwd(self.q, self.k, self.v, *self.rest)

    def backward(self, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.ckptfused.attention_bwd(self.dout, self.q, self.k, self.v, o, lse, *self.rest)

    def run(self) -> tuple[Tensor, ...]:
        o, lse = self.forward()
        return (o, lse, *self.backward(o, lse))


def make_mask(c: Case) -> tuple[Tensor | None, str]:
    shape = (c.batch, c.heads, c.tokens, c.tokens)
    keep = torch.rand(shape) < 0.7
    keep[:, :, c.tokens // 2 :][:, :, :1] = False  # a query that sees nothing
    bias = torch.randn(shape)
    match c.mask:
        case "none":
            return None, "none"
        case "keep":
            return keep, "keep"
        case "drop":
            return ~keep, "drop"
        case "add":
            return bias.to(c.dtype), "add"
        case "add-inf":
            return bias.masked_fill(~keep, -torch.inf).transpose(2, 3).contiguous().transpose(2, 3), "add"
        case "add-float32" | "add-bfloat16" | "add-float16":
            dtype = getattr(torch, c.mask.removeprefix("add-"))
            return bias.to(dtype).masked_fill(~keep, torch.finfo(dtype).min), "add"
        case "shared":
            return keep[:1, :1].to(torch.bool), "keep"
        case "head":
            return bias[:1, :, :, :1].bfloat16(), "add"
        case "float64":
            return bias[:, :1, :1].double(), "add"
    raise ValueError(c.mask)


def make_padding(c: Case) -> tuple[Tensor | None, str]:
    keep = torch.arange(c.tokens)[None] < torch.tensor([[c.tokens - c.tokens // 3], [c.tokens]])[: c.batch]
    match c.padding:
        case "none":
            return None, "none"
        case "keep":
            return keep, "keep"
        case "drop":
            return ~keep, "drop"
        case "add":
            return torch.zeros(keep.shape).masked_fill(~keep, -torch.inf), "add"
    raise ValueError(c.padding)


def make_call(c: Case, device: str = "cpu") -> Call:
    """The case's tensors, drawn on the CPU: all devices see the same numbers."""

    def slices(*heads: int) -> list[Tensor]:
        # As in the block: slices of one [B, T, width] buffer.
        buffer = torch.randn(c.batch, c.tokens, sum(heads) * c.head_dim, dtype=torch.float64).to(device, c.dtype)
        parts = buffer.split([h * c.head_dim for h in heads], -1)
        return [p.unflatten(-1, (-1, c.head_dim)).transpose(1, 2) for p in parts]

    q, k, v = slices(c.heads, c.kv_heads, c.kv_heads)
    (dout,) = slices(c.heads)
    mask, mask_kind = make_mask(c)
    padding, padding_kind = make_padding(c)
    cu_seqlens = torch.tensor(c.packed, dtype=torch.int32) if c.packed else None
    rng_state = torch.tensor([SEED, OFFSET]) if c.p else None
    options = (mask_kind, padding_kind, c.scale, c.causal, c.window, c.softcap, c.p)
    tensors = (None if t is None else t.to(device) for t in (mask, padding, cu_seqlens, rng_state))
    return Call(c, q, k, v, dout, (*tensors, *options))


def reference(call: Call, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """(o, lse, dq, dk, dv) of the materialised attention run in `dtype` where the call is, a sequence at a time."""
    c = call.case
    mask, padding, *_ = call.rest
    leaves = [t.to(dtype).detach().requires_grad_() for t in (call.q, call.k, call.v)]
    bounds = c.packed or (0, c.tokens)
    longest = max(b - a for a, b in itertools.pairwise(bounds))
    sequences = len(bounds) - 1 if c.packed else c.batch
    drops = philox_mask((sequences, c.heads, longest, longest), c.p, SEED, OFFSET, 0) if c.p else None
    o = torch.zeros(call.q.shape, dtype=dtype, device=call.q.device)
    lse = torch.full(call.q.shape[:3], -torch.inf, dtype=dtype, device=call.q.device)
    for s, (a, b) in enumerate(itertools.pairwise(bounds)):
        q, k, v = (t[:, :, a:b] for t in leaves)
        keep = None
        if drops is not None:
            keep = (drops[s : s + 1, :, : b - a, : b - a] if c.packed else drops).to(call.q.device)
        part, part_lse = attention(
            *(q, k, v),
            mask=mask,
            mask_kind=call.rest[4],
            padding=padding,
            padding_kind=call.rest[5],
            scale=c.scale,
            causal=c.causal,
            window=c.window,
            softcap=c.softcap,
            keep=keep,
            p=c.p,
        )
        o = torch.cat([o[:, :, :a], part, o[:, :, b:]], 2)
        lse[:, :, a:b] = part_lse.detach()
    return (o.detach(), lse, *torch.autograd.grad(o, leaves, call.dout.to(dtype)))

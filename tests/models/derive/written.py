"""Blocks as people write them, as source texts that tests change in one place."""

from __future__ import annotations

import math
import sys
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

LLAMA = """
class RMSNorm(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(width) + 0.5), eps

    def forward(self, x):
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.type_as(x)


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def turn(x, cos, sin):
    return x * cos + rotate_half(x) * sin


class Attention(nn.Module):
    def __init__(self, width, heads, kv_heads, p):
        super().__init__()
        self.heads, self.kv_heads, self.dim, self.p = heads, kv_heads, width // heads, p
        self.wq = nn.Linear(width, heads * self.dim, bias=False)
        self.wk = nn.Linear(width, kv_heads * self.dim, bias=True)
        self.wv = nn.Linear(width, kv_heads * self.dim, bias=False)
        self.wo = nn.Linear(heads * self.dim, width, bias=False)
        self.q_norm, self.k_norm = RMSNorm(self.dim), RMSNorm(self.dim)

    def forward(self, x, cos, sin, mask):
        B, T, C = x.shape
        q = self.wq(x).view(B, T, self.heads, self.dim)
        k = self.wk(x).view(B, T, self.kv_heads, self.dim)
        v = self.wv(x).view(B, T, self.kv_heads, self.dim)
        q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        k = k.repeat_interleave(self.heads // self.kv_heads, dim=1)
        v = v.repeat_interleave(self.heads // self.kv_heads, dim=1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.dim)
        scores = 30.0 * torch.tanh(scores / 30.0)
        scores = scores + mask
        probs = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        probs = F.dropout(probs, p=self.p, training=self.training)
        y = (probs @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.wo(y)


class Block(nn.Module):
    def __init__(self, width=24, heads=4, kv_heads=2, hidden=40, p=0.0):
        super().__init__()
        self.attention = Attention(width, heads, kv_heads, p)
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.drop = nn.Dropout(p)

    def forward(self, x, cos, sin, mask):
        a = self.attention(self.norm1(x), cos, sin, mask)
        x = x + 0.5 * self.drop(a)
        n = self.norm2(x)
        h = self.drop(F.silu(self.w1(n)) * self.w3(n))
        f = self.w2(h)
        return x + 0.5 * self.drop(f)
"""
"""Written out: q/k norms, rotation, grouped heads, a soft-cap, a given mask, multipliers."""

GPT = """
class LayerNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(width) + 0.5), nn.Parameter(torch.randn(width))

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


def new_gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class Attention(nn.Module):
    def __init__(self, width, heads, p, longest=64):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn_dropout, self.resid_dropout = nn.Dropout(p), nn.Dropout(p)
        self.heads, self.width = heads, width
        self.register_buffer("bias", torch.tril(torch.ones(longest, longest)).view(1, 1, longest, longest))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.width, dim=2)
        k = k.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        q = q.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        v = v.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.attn_dropout(att)
        y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        y = self.resid_dropout(self.c_proj(y))
        return y


class Block(nn.Module):
    def __init__(self, width=24, heads=4, p=0.0):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = LayerNorm(width), Attention(width, heads, p), LayerNorm(width)
        self.c_fc, self.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(p)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        m = self.dropout(self.c_proj(new_gelu(self.c_fc(self.ln_2(x)))))
        x = x + m
        return x
"""
"""In the manner of minGPT: a joint product, a causal buffer, GELU spelled out."""


WIDE = """
class RMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(width) + 0.5), eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Block(nn.Module):
    def __init__(self, width=24, heads=4):
        super().__init__()
        self.heads, self.dim = heads, width // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.q_norm, self.k_norm, self.post = (RMSNorm(width, 1e-5) for _ in range(3))
        self.up_bias = nn.Parameter(torch.randn(width))
        self.register_buffer("rates", 10.0 ** -torch.arange(3.0))
        self.register_buffer("bias", torch.randn(64, 1))

    def heads_of(self, t):
        return t.view(t.size(0), t.size(1), self.heads, self.dim).transpose(1, 2).reshape(-1, t.size(1), self.dim)

    def turn(self, t, cos, sin):
        even, odd = t[..., ::2], t[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)

    def forward(self, x, at, slopes, hidden, output_attentions=False):
        B, T, C = x.shape
        n = x
        q, k = self.q_norm(self.wq(n)), self.k_norm(self.wk(n))
        q, k, v = self.heads_of(q), self.heads_of(k), self.heads_of(self.wv(n))
        angles = at[:, None] * self.rates
        cos, sin = angles.cos(), angles.sin()
        q, k = self.turn(q, cos, sin), self.turn(k, cos, sin)
        scores = torch.bmm(q, k.transpose(1, 2)).view(B, self.heads, T, T) * self.dim**-0.5
        near = torch.ones(T, T, dtype=torch.bool, device=x.device).tril().triu(-8)
        scores = scores.masked_fill(~near, -math.inf)
        scores = scores + slopes
        scores = scores.masked_fill(hidden, -math.inf)
        probs = F.softmax(scores, -1)
        y = torch.bmm(probs.view(-1, T, T), v).view(B, self.heads, T, self.dim).transpose(1, 2).reshape(B, T, C)
        a = self.wo(y)
        a += self.up_bias
        a = self.post(a)
        return x + a, probs
"""
"""Norms of whole rows and after the branch, heads of three dimensions, tables and masks of the layer's own, a sum in
place, weights that are returned."""


HALVED = """
class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return t.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / 2
"""
"""What halves a gradient, of which no recording of its forward tells."""


def made(source: str, **options: Any) -> nn.Module:
    """A block of a source text, with random weights."""
    module = sys.modules["written"] = types.ModuleType("written")  # Dynamo looks for the globals of code there
    space: dict[str, Any] = vars(module)
    space |= {"torch": torch, "nn": nn, "F": F, "math": math}
    exec(compile(source, "written.py", "exec"), space)
    torch.manual_seed(0)
    return space["Block"](**options)


def arguments(source: str, tokens: int = 12, batch: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """A call of a block of one of these texts."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, tokens, 24, generator=generator, dtype=dtype)
    if "slopes" in source:
        slopes = torch.randn(4, 1, tokens, generator=generator, dtype=dtype)
        hidden = torch.rand(batch, 1, 1, tokens, generator=generator) < 0.2
        hidden[..., :1] = False
        return x, torch.arange(tokens).to(dtype), slopes, hidden
    if "cos" not in source:
        return (x,)
    angle = torch.arange(tokens, dtype=dtype)[:, None] * 10.0 ** -torch.arange(3, dtype=dtype)
    angle = torch.cat((angle, angle), -1)
    mask = torch.full((tokens, tokens), -torch.inf, dtype=dtype).triu(1)
    mask = mask + torch.randn(tokens, tokens, generator=generator, dtype=dtype)
    return x, angle.cos(), angle.sin(), mask

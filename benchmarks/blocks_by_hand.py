"""Blocks as people write them, after nanoGPT, minGPT, lit-llama and Meta's Llama: for the sweep of architectures."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, HIDDEN, LONGEST = 64, 4, 112, 32
VOCABULARY = 96


class NanoNorm(nn.Module):
    """A LayerNorm with or without bias."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class NanoAttention(nn.Module):
    """A joint product, and PyTorch's own attention."""

    def __init__(self, p: float, bias: bool) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.resid_dropout, self.dropout = nn.Dropout(p), p
        self.flash = hasattr(F, "scaled_dot_product_attention")

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(WIDTH, dim=2)
        q, k, v = (t.view(B, T, HEADS, C // HEADS).transpose(1, 2) for t in (q, k, v))
        if not self.flash:
            raise RuntimeError("expected a PyTorch with scaled_dot_product_attention")
        p = self.dropout if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=p, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))  # type: ignore[no-any-return]


class NanoBlock(nn.Module):
    """nanoGPT's block."""

    def __init__(self, p: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = NanoNorm(WIDTH, bias), NanoNorm(WIDTH, bias)
        self.attn = NanoAttention(p, bias)
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH, bias=bias), nn.Linear(4 * WIDTH, WIDTH, bias=bias)
        self.gelu, self.dropout = nn.GELU(), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.dropout(self.c_proj(self.gelu(self.c_fc(self.ln_2(x)))))  # type: ignore[no-any-return]


class NewGELU(nn.Module):
    """GELU by tanh, spelled out."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class MinAttention(nn.Module):
    """Attention written out, with a buffer for its causal mask."""

    bias: Tensor

    def __init__(self, p: float) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attn_dropout, self.resid_dropout = nn.Dropout(p), nn.Dropout(p)
        self.register_buffer("bias", torch.tril(torch.ones(LONGEST, LONGEST)).view(1, 1, LONGEST, LONGEST))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(WIDTH, dim=2)
        k = k.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        q = q.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        v = v.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))  # type: ignore[no-any-return]


class MinBlock(nn.Module):
    """minGPT's block, its MLP a lambda over a dictionary of modules."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), MinAttention(p), nn.LayerNorm(WIDTH)
        parts: dict[str, nn.Module] = {
            "c_fc": nn.Linear(WIDTH, 4 * WIDTH),
            "c_proj": nn.Linear(4 * WIDTH, WIDTH),
            "act": NewGELU(),
            "dropout": nn.Dropout(p),
        }
        m: Any = nn.ModuleDict(parts)
        self.mlp = m
        self.mlpf: Any = lambda x: m.dropout(m.c_proj(m.act(m.c_fc(x))))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlpf(self.ln_2(x))


class RMSNorm(nn.Module):
    """A norm by the mean of squares."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.scale, self.eps = nn.Parameter(torch.ones(WIDTH)), eps

    def forward(self, x: Tensor) -> Tensor:
        norm_x = torch.mean(x * x, dim=-1, keepdim=True)
        return self.scale * (x * torch.rsqrt(norm_x + self.eps))


def lit_rope(x: Tensor, cache: Tensor) -> Tensor:
    """A rotation of neighbours, by a table of pairs [T, D/2, 2]."""
    cache = cache[: x.size(1)]
    pairs = x.float().reshape(*x.shape[:-1], -1, 2) if x.dtype != torch.float64 else x.reshape(*x.shape[:-1], -1, 2)
    cache = cache.view(1, pairs.size(1), 1, pairs.size(3), 2)
    turned = torch.stack(
        [
            pairs[..., 0] * cache[..., 0] - pairs[..., 1] * cache[..., 1],
            pairs[..., 1] * cache[..., 0] + pairs[..., 0] * cache[..., 1],
        ],
        -1,
    )
    return turned.flatten(3).type_as(x)


class LitBlock(nn.Module):
    """lit-llama's block: RMSNorm, a joint product, neighbours turned, a given mask."""

    def __init__(self) -> None:
        super().__init__()
        self.rms_1, self.rms_2 = RMSNorm(), RMSNorm()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.c_fc1, self.c_fc2 = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.mlp_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def attention(self, x: Tensor, rope: Tensor, mask: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(WIDTH, dim=2)
        q, k, v = (t.view(B, T, HEADS, C // HEADS) for t in (q, k, v))
        q, k = lit_rope(q, rope).transpose(1, 2), lit_rope(k, rope).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), attn_mask=mask, dropout_p=0.0)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, rope: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.rms_1(x), rope, mask)
        h = self.rms_2(x)
        return x + self.mlp_proj(F.silu(self.c_fc1(h)) * self.c_fc2(h))  # type: ignore[no-any-return]


def repeat_kv(x: Tensor, times: int) -> Tensor:
    """Each head of keys or values, several times."""
    B, T, heads, D = x.shape
    return x[:, :, :, None, :].expand(B, T, heads, times, D).reshape(B, T, heads * times, D)


class MetaBlock(nn.Module):
    """The block of Meta's Llama: complex rotations, grouped heads, attention written out."""

    def __init__(self, kv_heads: int = 2) -> None:
        super().__init__()
        self.kv_heads, dim = kv_heads, WIDTH // HEADS
        self.wq, self.wo = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk, self.wv = (nn.Linear(WIDTH, kv_heads * dim, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.attention_norm, self.ffn_norm = RMSNorm(), RMSNorm()

    def attention(self, x: Tensor, turns: Tensor, mask: Tensor) -> Tensor:
        B, T, C = x.shape
        dim = C // HEADS
        xq, xk, xv = self.wq(x).view(B, T, HEADS, dim), *(w(x).view(B, T, -1, dim) for w in (self.wk, self.wv))
        by = turns.view(1, T, 1, dim // 2)
        xq, xk = (
            torch.view_as_real(torch.view_as_complex(t.reshape(*t.shape[:-1], -1, 2)) * by).flatten(3).type_as(x)
            for t in (xq, xk)
        )
        keys, values = (repeat_kv(t, HEADS // self.kv_heads).transpose(1, 2) for t in (xk, xv))
        scores = torch.matmul(xq.transpose(1, 2), keys.transpose(2, 3)) / math.sqrt(dim)
        scores = F.softmax((scores + mask).float() if x.dtype != torch.float64 else scores + mask, dim=-1).type_as(xq)
        return self.wo(torch.matmul(scores, values).transpose(1, 2).contiguous().view(B, T, -1))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, turns: Tensor, mask: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), turns, mask)
        n = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(n)) * self.w3(n))  # type: ignore[no-any-return]


class Stack(nn.Module):
    """Two blocks between an embedding and a head, all called with the same tensors beside x."""

    def __init__(self, block: Callable[[], nn.Module], *given: Tensor) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.given = given

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, *self.given)
        return self.head(x)  # type: ignore[no-any-return]


def angles(tokens: int) -> Tensor:
    """By how much each pair of a head is turned at each position."""
    return torch.arange(tokens, dtype=torch.float64)[:, None] * 10_000.0 ** -torch.arange(0, 1, 2 / (WIDTH // HEADS))

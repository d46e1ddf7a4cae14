"""Plain PyTorch models that benchmarks compare with. Those that the demo trains, too: ckptfused/cli/models.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ckptfused.cli.models import PlainBlock


class HuggingFaceBlock(nn.Module):
    """A Llama layer, operation by operation as in ``transformers``: norms in float32 written out, seven products,
    rotate_half, SDPA. Its weights are a PlainBlock's."""

    def __init__(self, plain: PlainBlock) -> None:
        super().__init__()
        self.shape, self.plain = plain.shape, plain
        s = plain.shape
        rows = (s.nhead * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.head_dim)
        parts = plain.self_attn.in_proj_weight.detach().split(rows)
        self.q, self.k, self.v = (nn.Parameter(part.clone()) for part in parts)
        self.gate, self.up = (nn.Parameter(part.clone()) for part in plain.linear1.weight.detach().chunk(2))

    def weights(self) -> list[nn.Parameter]:
        p = self.plain
        shared = [p.self_attn.out_proj.weight, p.linear2.weight, p.norm1.weight, p.norm2.weight]
        return [self.q, self.k, self.v, self.gate, self.up, *shared]  # type: ignore[list-item]

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.shape.eps)
        return weight * wide.to(x.dtype)

    @staticmethod
    def rotate_half(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    def attention(self, x: Tensor) -> Tensor:
        (batch, tokens, _), dim = x.shape, self.shape.head_dim
        q, k, v = (F.linear(x, w).view(batch, tokens, -1, dim).transpose(1, 2) for w in (self.q, self.k, self.v))
        cos, sin = (torch.cat((t, t), -1)[None, None] for t in self.plain.tables(x))
        q = q * cos + self.rotate_half(q) * sin
        k = k * cos + self.rotate_half(k) * sin
        grouped = self.shape.kv_heads != self.shape.nhead
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.plain.self_attn.out_proj(o.transpose(1, 2).reshape(batch, tokens, -1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x, self.plain.norm1.weight))
        n = self.norm(x, self.plain.norm2.weight)
        return x + self.plain.linear2(F.silu(F.linear(n, self.gate)) * F.linear(n, self.up))

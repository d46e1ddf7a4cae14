"""One Llama-style decoder in four variants that differ only in how a layer trains.

The plain layer is eager PyTorch written as well as we can: joint QKV and gate/up products, ``F.rms_norm``,
``F.scaled_dot_product_attention(is_causal=True)``. Its parameters carry the names and shapes of
``FusedCheckpointBlock.llama``, so all variants load the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Variant = Literal["plain", "torch.utils.checkpoint", "ckptfused all", "ckptfused inputs"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one layer, in PyTorch's words, and how often it is stacked."""

    d_model: int
    nhead: int
    dim_feedforward: int
    layers: int
    num_kv_heads: int | None = None
    residual_dropout: float = 0.0
    rope_theta: float = 10_000.0
    eps: float = 1e-5

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.nhead

    @property
    def head_dim(self) -> int:
        return self.d_model // self.nhead

    @property
    def parameters_per_layer(self) -> int:
        """Entries of the matrices of one layer."""
        c, f = self.d_model, self.dim_feedforward
        return 2 * c * c + 2 * c * self.kv_heads * self.head_dim + 3 * c * f


def rope_tables(tokens: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [tokens, head_dim / 2], computed in float64."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(tokens, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on half-split pairs of the last dimension of x [B, H, T, D]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class PlainAttention(nn.Module):
    """Causal attention with RoPE and grouped heads, [B, T, C] to [B, T, C]."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.shape = shape
        rows = (shape.nhead + 2 * shape.kv_heads) * shape.head_dim
        self.in_proj_weight = nn.Parameter(torch.empty(rows, shape.d_model))
        self.out_proj = nn.Linear(shape.nhead * shape.head_dim, shape.d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        heads, kv, dim = self.shape.nhead, self.shape.kv_heads, self.shape.head_dim
        qkv = F.linear(x, self.in_proj_weight).view(batch, tokens, heads + 2 * kv, dim).transpose(1, 2)
        q, k, v = qkv.split((heads, kv, kv), dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv != heads)
        return self.out_proj(o.transpose(1, 2).reshape(batch, tokens, heads * dim))


class PlainBlock(nn.Module):
    """A pre-norm Llama layer in eager PyTorch."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.shape = shape
        self.self_attn = PlainAttention(shape)
        self.linear1 = nn.Linear(shape.d_model, 2 * shape.dim_feedforward, bias=False)  # gate rows, then up rows
        self.linear2 = nn.Linear(shape.dim_feedforward, shape.d_model, bias=False)
        self.norm1 = nn.RMSNorm(shape.d_model, eps=shape.eps)
        self.norm2 = nn.RMSNorm(shape.d_model, eps=shape.eps)
        self._tables: tuple[Tensor, Tensor] | None = None

    def tables(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self._tables is None or len(self._tables[0]) != x.shape[1] or self._tables[0].dtype != x.dtype:
            cos, sin = rope_tables(x.shape[1], self.shape.head_dim, self.shape.rope_theta)
            self._tables = cos.to(x), sin.to(x)
        return self._tables

    def forward(self, x: Tensor) -> Tensor:
        p = self.shape.residual_dropout if self.training else 0.0
        x = x + F.dropout(self.self_attn(self.norm1(x), *self.tables(x)), p)
        gate, up = self.linear1(self.norm2(x)).chunk(2, dim=-1)
        return x + F.dropout(self.linear2(F.silu(gate) * up), p)


class TorchCheckpoint(nn.Module):
    """A layer under the non-reentrant ``torch.utils.checkpoint``, with its options."""

    def __init__(self, block: nn.Module, **options: Any) -> None:
        super().__init__()
        self.block, self.options = block, options

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, **self.options, **kwargs)


class Decoder(nn.Module):
    """Byte-level language model: embedding, layers, norm, logits; called, the mean loss of a batch."""

    def __init__(self, shape: LayerShape, layers: nn.ModuleList, vocabulary: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, shape.d_model)
        self.layers = layers
        self.norm = nn.RMSNorm(shape.d_model, eps=shape.eps)
        self.head = nn.Linear(shape.d_model, vocabulary, bias=False)

    def logits(self, tokens: Tensor) -> Tensor:
        """The scores of each next byte, [B, T] to [B, T, vocabulary]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(tokens).flatten(0, 1).float(), targets.flatten())


def initialise(module: nn.Module, layers: int, seed: int) -> None:
    """Normal weights, as for GPT-2: 0.02, and 0.02/√(2·layers) where a product joins the residual stream.

    Drawn on the device that they are on.
    """
    device = next(module.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(1.0)
            else:
                joins = name.endswith(("out_proj.weight", "linear2.weight"))
                parameter.normal_(0.0, 0.02 / (2 * layers) ** 0.5 if joins else 0.02, generator=generator)


def plain_layers(
    shape: LayerShape, *, dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu"
) -> nn.ModuleList:
    """The plain stack with its initial weights, from which every other variant is made."""
    with torch.device(device):
        layers = nn.ModuleList(PlainBlock(shape) for _ in range(shape.layers))
    initialise(layers, shape.layers, seed)
    return layers.to(dtype)


def variant_layers(variant: Variant, plain: nn.ModuleList, shape: LayerShape) -> nn.ModuleList:
    """The same stack with the same weights, as ``variant`` trains it. ``plain`` itself is left alone."""
    if variant == "plain":
        return plain
    if variant == "torch.utils.checkpoint":
        return nn.ModuleList(map(TorchCheckpoint, plain))
    from ckptfused import FusedCheckpointBlock

    layers = nn.ModuleList()
    for block in plain:
        weight = next(block.parameters())
        fused = FusedCheckpointBlock.llama(
            shape.d_model,
            shape.nhead,
            dim_feedforward=shape.dim_feedforward,
            num_kv_heads=shape.kv_heads,
            residual_dropout=shape.residual_dropout,
            rope_theta=shape.rope_theta,
            norm_eps=shape.eps,
            keep=variant.removeprefix("ckptfused "),
            device=weight.device,
            dtype=weight.dtype,
        )
        fused.load_state_dict(block.state_dict(), strict=True)
        layers.append(fused.train(block.training))
    return layers

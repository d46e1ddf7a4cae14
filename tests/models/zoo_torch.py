"""`torch.nn`'s encoder and decoder layers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.zoo import Specimen, add

WIDTH, HEADS, HIDDEN = 48, 4, 88


class Output(NamedTuple):
    loss: Tensor


def settled(model: nn.Module) -> nn.Module:
    """Without the random biases that PyTorch starts from: `randomize` adds to them."""
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(p)
    return model


class Encoder(nn.Module):
    """Two layers called as `nn.TransformerEncoder` calls them."""

    def __init__(self, p: float, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, p, **options)
        self.encoder: Any = settled(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))

    def forward(self, x: Tensor, **masks: Any) -> Output:
        first = self.encoder.layers[0].self_attn.batch_first
        y = self.encoder(x if first else x.transpose(0, 1), **masks)
        return Output((y if first else y.transpose(0, 1)).mul(x.cos()).sum(-1).square().mean())


class Decoder(nn.Module):
    def __init__(self, p: float, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH, HEADS, HIDDEN, p, **options)
        self.decoder: Any = settled(nn.TransformerDecoder(layer, 2))

    def forward(self, x: Tensor, memory: Tensor, **masks: Any) -> Output:
        first = self.decoder.layers[0].self_attn.batch_first
        inputs = (x, memory) if first else (x.transpose(0, 1), memory.transpose(0, 1))
        y = self.decoder(*inputs, **masks)
        return Output((y if first else y.transpose(0, 1)).mul(x.cos()).sum(-1).square().mean())


def values(length: int, seed: int = 1) -> Tensor:
    return torch.randn(3, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def padding(length: int) -> Tensor:
    mask = torch.zeros(3, length, dtype=torch.bool)
    mask[1, length - 7 :] = True
    return mask


def encoder_batch(mask: Tensor | None = None, **options: Any) -> Any:
    return lambda: {
        "x": values(19),
        "src_key_padding_mask": padding(19),
        **({} if mask is None else {"mask": mask}),
        **options,
    }


def decoder_batch() -> Any:
    causal = nn.Transformer.generate_square_subsequent_mask(11)
    return {
        "x": values(11),
        "memory": values(19, 2),
        "tgt_mask": causal,
        "tgt_is_causal": True,
        "memory_key_padding_mask": padding(19),
    }


def still(model: Any) -> None:
    """Cross attention is checkpointed."""
    for layer in model.decoder.layers:
        layer.multihead_attn.dropout = layer.dropout2.p = 0.0


upper = torch.ones(19, 19, dtype=torch.bool).triu(1)
biases = torch.randn(3 * HEADS, 19, 19, generator=torch.Generator().manual_seed(3))
ENCODERS: tuple[tuple[str, dict[str, Any], Any], ...] = (
    ("post", {}, encoder_batch()),
    ("pre", {"norm_first": True, "activation": "gelu"}, encoder_batch(upper, is_causal=True)),
    ("post-batch-first", {"batch_first": True, "activation": F.silu}, encoder_batch(upper)),
    ("pre-batch-first", {"batch_first": True, "norm_first": True, "bias": False}, encoder_batch()),
    (
        "biased",
        {"norm_first": True, "activation": nn.GELU("tanh")},
        encoder_batch(biases, src_key_padding_mask=padding(19).float() * -1e4),
    ),
)
for name, options, batch in ENCODERS:
    add(
        Specimen(
            f"torch-encoder-{name}",
            lambda p, implementation, options=options: Encoder(p, **options),
            batch,
            lambda model: list(model.encoder.layers),
            implementations=("torch",),
            sites=lambda layer: ((0, 0), (0, 1), (0, 2), (0, 3)),
        )
    )
for name, options in (
    ("post", {}),
    ("pre", {"norm_first": True, "activation": "gelu"}),
    ("post-batch-first", {"batch_first": True}),
    ("pre-batch-first", {"batch_first": True, "norm_first": True}),
):
    add(
        Specimen(
            f"torch-decoder-{name}",
            lambda p, implementation, options=options: Decoder(p, **options),
            decoder_batch,
            lambda model: list(model.decoder.layers),
            "part",
            ("torch",),
            sites=lambda layer: ((0, 0), (0, 1), (1, 2), (1, 3)),
            still=still,
        )
    )

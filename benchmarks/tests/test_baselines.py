"""The models that benchmarks compare with compute what they stand for."""

from __future__ import annotations

import torch

from benchmarks.baselines import HuggingFaceBlock
from ckptfused.cli.models import LayerShape, plain_layers


def test_the_eager_layer_is_the_same_layer() -> None:
    """The Hugging Face way to write it gives the values of the plain one."""
    shape = LayerShape(64, 4, 96, layers=1, num_kv_heads=2)
    plain = plain_layers(shape, dtype=torch.float64)[0]
    eager = HuggingFaceBlock(plain)  # type: ignore[arg-type]
    x = torch.randn(2, 9, 64, dtype=torch.float64)
    # Its norms are in float32 whatever comes in.
    torch.testing.assert_close(eager(x), plain(x), rtol=1e-5, atol=1e-6)
    assert sum(w.numel() for w in eager.weights()) == sum(w.numel() for w in plain.parameters())

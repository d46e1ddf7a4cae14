"""What a module's masks promise: values that hide, and the flag for causality."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ckptfused import FusedCheckpointAttention

C, H = 16, 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("as_padding", [False, True])
def test_rows_of_the_lowest_value(as_padding: bool, dtype: torch.dtype) -> None:
    """They hide all keys; values above the threshold that the block's docstring states are added, as PyTorch does."""
    module = FusedCheckpointAttention(C, H, 0.0, batch_first=True, norm="none", norm_first=True, dtype=dtype)
    with torch.no_grad():
        module.self_attn.out_proj.bias.normal_()
    x, lowest = torch.randn(1, 5, C, dtype=dtype), torch.finfo(dtype).min
    above = -65472.0 if dtype == torch.float16 else -4e8

    def masks(value: float) -> tuple[Tensor | None, Tensor | None]:
        if as_padding:
            return None, torch.full((1, 5), value, dtype=dtype)
        return torch.full((5, 5), value, dtype=dtype), None

    assert torch.equal(module(x, *masks(lowest)), x + module.self_attn.out_proj.bias)
    assert torch.equal(module(x, *masks(lowest)), module(x, *masks(-torch.inf)))
    rounding = 8 * torch.finfo(dtype).eps  # of a few sums of numbers around one
    torch.testing.assert_close(
        module(x, *masks(above)), module._plain(x, *masks(above), False), rtol=rounding, atol=rounding
    )


@pytest.mark.parametrize("value", ["yes", 1.5, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_is_causal_is_named(causal: bool, value: Any) -> None:
    module, x = FusedCheckpointAttention(C, H, batch_first=True, causal=causal), torch.randn(1, 5, C)
    with pytest.raises(TypeError, match=f"^is_causal: expected a bool, got {value!r}"):
        module(x, is_causal=value)
    module.eval()
    assert torch.equal(module(x, is_causal=1), module(x, is_causal=True))

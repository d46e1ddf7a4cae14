"""Adapters whose products a GPU makes in half precision."""

from __future__ import annotations

import pytest

from tests.autograd.test_adapters import check_half_precision, half_precision_results, of_large_scales
from tests.devices import repeatable

pytestmark = pytest.mark.gpu


def test_half_precision_products_are_as_exact() -> None:
    """The gradients are as exact as the CPU's in float32, with the same bits whatever is kept."""
    repeatable("cuda")
    check_half_precision(half_precision_results("cuda"))


def test_scales_are_not_beyond_float16() -> None:
    assert of_large_scales("cuda") == of_large_scales("cpu")

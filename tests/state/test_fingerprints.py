"""Checksums: equal bits have equal ones, others do not, on the CPU and by the way that other devices go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ckptfused.state.fingerprints import Fingerprints, bits_equal, local

pytestmark = pytest.mark.once
WAYS = ("_of_cpu", "_elsewhere")


def made(way: str, t: Tensor) -> Any:
    prints = Fingerprints()
    found = getattr(prints, way)(t)
    prints.settle()
    return found


@pytest.mark.parametrize("way", WAYS)
@given(seed=st.integers(0, 2**31), size=st.integers(1, 3000), data=st.data())
def test_one_changed_bit_is_seen(way: str, seed: int, size: int, data: st.DataObject) -> None:
    t = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    other = t.clone()
    assert made(way, t) == made(way, other)
    place, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 30))
    other.view(torch.int32)[place] ^= 1 << bit
    assert made(way, t) != made(way, other) and not bits_equal(t, other)


@pytest.mark.parametrize("way", WAYS)
@given(size=st.integers(2, 3000), data=st.data())
def test_two_values_that_changed_places_are_seen(way: str, size: int, data: st.DataObject) -> None:
    """A mask of dropout on equal values, say."""
    first, second = sorted(data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True)))
    one, other = torch.zeros(size), torch.zeros(size)
    one[first] = other[second] = 1.0
    assert made(way, one) != made(way, other)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.bool]
)
@pytest.mark.parametrize("way", WAYS)
def test_all_types_and_forms_have_one(way: str, dtype: torch.dtype) -> None:
    t = torch.arange(24).remainder(5).view(4, 6).to(dtype)
    assert made(way, t.t()) == made(way, t.t().contiguous()) != made(way, t)
    assert made(way, t.view(-1)[1:9]) == made(way, t.view(-1)[1:9].clone()) != made(way, t.view(-1)[2:10])
    empty = t[:0]
    assert made(way, empty) == made(way, empty.clone())
    assert made(way, t[0, 0]) == made(way, t[0, 0].clone())


def test_shapes_types_and_plain_values_count() -> None:
    prints = Fingerprints()
    t = torch.zeros(4)
    assert prints.of(t) != prints.of(t.view(2, 2)) and prints.of(t) != prints.of(t.int())
    assert prints.of({"a": t, "b": 1}) != prints.of({"a": t, "b": 2})
    assert prints.of([t, None]) == prints.of([t.clone(), None])
    assert torch.equal(t, torch.zeros(4)) and t._version == 0
    lent: Any = torch._lazy_clone(t)
    prints.of(lent)
    assert torch._C._is_cow_tensor(lent)  # type: ignore[attr-defined]


def test_memory_that_was_given_back_is_not_read() -> None:
    """FSDP1's modules hold views of it between steps."""
    whole = torch.ones(8)
    view = whole[4:]
    whole.untyped_storage().resize_(0)
    assert local(whole) is None and local(view) is None
    assert Fingerprints().of([whole, view]) == (((8,), torch.float32), ((4,), torch.float32))
    assert local(torch.empty(0)) is not None


def test_a_storage_can_still_be_resized() -> None:
    """FSDP frees gathered weights by resizing them, which NumPy's view of a storage would forbid for good."""
    t = torch.randn(8)
    Fingerprints().of(t)
    t.untyped_storage().resize_(0)
    assert t.untyped_storage().nbytes() == 0

from __future__ import annotations

import pytest

from ckptfused.sizes import counted, parse_bytes


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (5, 5),
        ("5", 5),
        ("256MiB", 256 << 20),
        ("1.5 GB", 1_500_000_000),
        ("2kib", 2048),
        ("1 TiB", 1 << 40),
        ("3b", 3),
        (40e9, 40 * 10**9),
    ],
)
def test_numbers_of_bytes(value: float | str, count: int) -> None:
    assert parse_bytes("scratch", value) == count


@pytest.mark.parametrize("value", ["", "MiB", "5 miles", "-1", "0", "0.1"])
def test_what_is_no_number_of_bytes(value: str) -> None:
    with pytest.raises(ValueError, match='scratch: expected a number of bytes such as 268435456 or "256MiB"'):
        parse_bytes("scratch", value)


def test_one_and_several() -> None:
    assert [counted(n, "layer") for n in (0, 1, 2, 2048)] == ["0 layers", "1 layer", "2 layers", "2,048 layers"]

"""A wrong result names its worst element."""

from __future__ import annotations

import pytest
import torch

from benchmarks.differences import expect_close, worst

pytestmark = pytest.mark.once


def test_the_worst_element_is_named() -> None:
    right = torch.linspace(-1, 1, 2 * 300 * 200).view(2, 300, 200)
    found = right.clone()
    found[1, 205, 133] = 7.5
    found[1, 207, 140:150] += 0.5
    text = worst(found, right)
    assert "row 505 of 600, column 133 of 200 (index (1, 205, 133); tile 3, 1 of 128 x 128, there at 121, 5)" in text
    assert f"got 7.5, right is {float(right[1, 205, 133]):.6g};" in text
    assert "11 of 120000 are off, in 2 rows from 505 to 507 and 11 columns from 133 to 149" in text
    assert "tile 7, 2 of 64 x 64, there at 57, 5" in worst(found, right, (64, 64))


def test_what_is_not_finite_is_worst() -> None:
    right = torch.ones(4, 8)
    found = right.clone()
    found[3, 2], found[0, 0] = torch.nan, 3.0
    assert "row 3 of 4, column 2 of 8" in worst(found, right)
    assert "1 are NaN" in worst(found, right)
    assert worst(torch.tensor(2.0), torch.tensor(1.0)).startswith("worst at row 0 of 1, column 0 of 1")
    assert "no element is off by a hundredth" in worst(right * 1.001, right)


def test_no_time_is_reported_of_a_wrong_result() -> None:
    right = torch.ones(4)
    assert expect_close("fine", right + 1e-4, right, 1e-3) == pytest.approx(1e-4, rel=0.01)
    with pytest.raises(SystemExit, match=r"nan: wrong result, no time reported.*row 0 of 1, column 2 of 4"):
        expect_close("nan", torch.tensor([1.0, 1.0, torch.nan, 1.0]), right, 1e-3)

"""The slow Philox against the published answers, and the masks made from it."""

from __future__ import annotations

import numpy as np
import pytest

from ckptfused.eager.philox import decisions, keep_threshold, philox4x32, philox_mask

ONES = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
PI_KEY = (0xA4093822, 0x299F31D0)

# Random123's kat_vectors file, philox4x32; the first line of each also stands in the design.
KNOWN = [
    (7, (0, 0, 0, 0), (0, 0), "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, (ONES,) * 4, (ONES,) * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (7, PI, PI_KEY, "4dfccaba 190a87f0 c47362ba b6b5242a"),
    (10, (0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, (ONES,) * 4, (ONES,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (10, PI, PI_KEY, "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("rounds", "counter", "key", "answer"), KNOWN)
def test_known_answers(rounds: int, counter: tuple[int, ...], key: tuple[int, ...], answer: str) -> None:
    assert " ".join(f"{word:08x}" for word in philox4x32(counter, key, rounds)) == answer


def test_arrays_go_through_the_same_lines() -> None:
    counter = [np.array([0, ONES, word], dtype=np.uint64) for word in PI]
    key = [np.array([0, ONES, word], dtype=np.uint64) for word in PI_KEY]
    words = philox4x32(counter, key)
    for i, (_, c, k, answer) in enumerate(KNOWN[:3]):
        assert [int(word[i]) for word in words] == [int(w, 16) for w in answer.split()], (c, k)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5 / 65536, 1.5 / 65536, 0.999999, 1.0])
def test_threshold_rounds_half_to_even(p: float) -> None:
    expected = {0.0: 0, 0.1: 6554, 0.5 / 65536: 0, 1.5 / 65536: 2, 0.999999: 65536, 1.0: 65536}
    assert keep_threshold(p) == expected[p]


def test_decision_of_one_element_by_hand() -> None:
    seed, offset, site, cols = 0x0123456789ABCDEF, 0xFEDCBA9876543210, 2, 13
    got = decisions(7, cols, seed, offset, site)
    for row, col in ((0, 0), (1, 0), (3, 5), (6, 12)):
        e = row * 16 + col
        counter = (e >> 3, 0, 0x76543210, 0xDCBA98 | site << 24)
        words = philox4x32(counter, (0x89ABCDEF, 0x01234567))
        assert int(got[row, col]) == words[(e & 7) >> 1] >> 16 * (e & 1) & 0xFFFF


def test_masks_ignore_how_leading_dimensions_are_grouped() -> None:
    flat = philox_mask((24, 11), 0.3, -5, 0, 1)
    assert flat.equal(philox_mask((2, 3, 4, 11), 0.3, -5, 0, 1).reshape(24, 11))


def test_all_kept_and_all_dropped() -> None:
    assert philox_mask((3, 9), 0.0, 1, 0, 0).all()
    assert not philox_mask((3, 9), 1.0, 1, 0, 0).any()
    with pytest.raises(ValueError, match=r"p: expected a probability in \[0, 1\], got 1.5"):
        philox_mask((3, 9), 1.5, 1, 0, 0)

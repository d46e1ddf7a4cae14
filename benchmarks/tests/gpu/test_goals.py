"""The ideal ratios, computed, against those derived by hand; and which goals there are."""

from __future__ import annotations

import pytest

from benchmarks.cases import LLAMA_3_8B
from benchmarks.gpu import goals
from benchmarks.gpu.timing import Times
from ckptfused.simulate.devices import DEVICES

DERIVED = (1.242, 1.165, 1.164, 1.005, 0.873)
"""Ratios of an H200 with 2 x 8192 tokens, products at full rate, each tensor moved once, no launches. Computed are
waves and launches too, which seven products of an eager layer feel more than our four: at most 2 % apart."""


def times(milliseconds: dict[str, float]) -> dict[str, Times]:
    return {name: Times(value, value, value, 3) for name, value in milliseconds.items()}


def test_computed_ratios_are_those_derived_by_hand() -> None:
    ideal = goals.ideals(LLAMA_3_8B, DEVICES["h200"])
    rows = goals.of(times(dict(ideal.milliseconds)), ideal)
    assert [row["ideal"] for row in rows] == pytest.approx(DERIVED, rel=0.02)
    for row in rows:
        assert row["value"] == pytest.approx(row["ideal"], abs=1e-3)
    assert [row["met"] for row in rows] == [True] * len(rows)  # each goal can be reached


@pytest.mark.parametrize("name", ["h100", "a100-80"])
def test_other_gpus_have_ideals_of_their_own(name: str) -> None:
    """Their memory is slower for its products, so that eager's passes over memory weigh more, or it is not."""
    here, h200 = (goals.ideals(LLAMA_3_8B, DEVICES[one]).milliseconds for one in (name, "h200"))
    assert here.keys() == h200.keys()
    assert all(here[variant] > h200[variant] for variant in here)
    ratio = {one: goals.ideals(LLAMA_3_8B, DEVICES[one]).milliseconds for one in (name, "h200")}
    assert ratio[name]["eager"] / ratio[name]["ckptfused all"] != pytest.approx(
        ratio["h200"]["eager"] / ratio["h200"]["ckptfused all"], rel=0.01
    )


def test_the_table_of_all_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    goals.main()
    text = capsys.readouterr().out
    assert text.startswith("|  | wanted | h200 | h100 |")
    assert "| ckptfused inputs / ckptfused all | ≤ 1.28 | 1.2" in text


def test_of_what_was_not_measured_there_is_no_goal() -> None:
    ideal = goals.Ideals("not known", {})
    rows = goals.of(times({"ckptfused inputs": 13.0, "ckptfused all": 10.0}), ideal)
    assert [(row["name"], row["value"], row["met"], row["ideal"]) for row in rows] == [
        ("ckptfused inputs / ckptfused all", 1.3, False, None)
    ]
    assert goals.ideals(LLAMA_3_8B, None).milliseconds == {}


def test_what_is_below_its_floor_is_looked_into() -> None:
    ideal = goals.Ideals("h200", {"ckptfused inputs": 12.4, "ckptfused all": 10.0})
    for measured, said in ((11.0, 1), (12.2, 0)):
        rows = goals.of(times({"ckptfused inputs": measured, "ckptfused all": 10.0}), ideal)
        assert len(goals.too_good(rows)) == said

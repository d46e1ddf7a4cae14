"""What all benchmarks have in common: how they are asked for, take turns, and become a result and its page."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks import runner
from benchmarks.__main__ import main as command
from benchmarks.benchmark import PROCESSOR, WALL, Benchmark, Goal, Rows, Sizes, Steps, number, option, ratio
from benchmarks.names import foreign, options

pytestmark = pytest.mark.once


@dataclass(frozen=True, kw_only=True)
class Weights(Sizes):
    """Options of each kind."""

    size: int = 3
    kind: str = option("one", "two")
    many: int = option(5, 7, every=False)


def declared(called: list[str]) -> Benchmark[Weights]:
    """A benchmark of two variants that note their calls."""

    def variants(sizes: Weights) -> Steps:
        return {"slow": lambda: called.append("slow"), "fast": lambda: called.append("fast")}

    def check(sizes: Weights, steps: Steps) -> str:
        if sizes.size < 0:
            raise SystemExit("no time reported")
        called.append("check")
        return "they agree"

    def figures(sizes: Weights, steps: Steps) -> Rows:
        return {"slow": {"peak": 4.0}, "fast": {"peak": 3.0}, "predicted": {"peak": 1.0}}

    return Benchmark(
        name="weights",
        doc="Weights of things.\n\nMore of it.",
        sizes=Weights(),
        variants=variants,
        check=check,
        figures=figures,
        columns=(number("peak, B", "peak"), ratio("memory", "slow", "peak")),
        goals=lambda sizes: (Goal("fast", "slow", 0.7, "peak", "peak"), Goal("fast", "slow", 0.8, "peak", "peak")),
        case=lambda sizes: sizes.kind,
        stem=lambda sizes: f"weights-{sizes.size}",
    )


def run(benchmark: Benchmark[Weights], folder: Path, words: str) -> tuple[int, list[str]]:
    """The exit status, and the names of the files."""
    before = torch.get_num_threads()
    try:
        status = runner.run(benchmark, [*words.split(), "--budget", "0", "--threads", "1", "--out", str(folder)])
    finally:
        torch.set_num_threads(before)
    return status, sorted(path.name for path in folder.iterdir())


def test_every_combination_is_a_case_and_cases_share_files(tmp_path: Path) -> None:
    status, files = run(declared([]), tmp_path, "--size 3 --size 4 --label here")
    assert (status, files) == (0, [f"weights-{n}-here.{kind}" for n in (3, 4) for kind in ("json", "md")])
    result = json.loads((tmp_path / "weights-4-here.json").read_text())
    assert [case["sizes"] for case in result["cases"]] == [
        {"seed": 0, "size": 4, "kind": kind, "many": 5} for kind in ("one", "two")
    ]
    assert result["environment"]["command"].startswith("python -m benchmarks weights --size 3 --size 4 --label here ")


def test_a_page(tmp_path: Path) -> None:
    run(declared([]), tmp_path, "--kind two --many 7")
    page = (tmp_path / "weights-3.md").read_text()
    assert page.startswith("# Weights of things\n\n| variant | median, s | p20 | p80 | peak, B | memory |\n|---|")
    assert " | 3.0 | 0.75× |\n" in page and "| predicted |  |  |  | 1.0 | 0.25× |\n" in page
    assert "At least 3 steps each, in turns." in page and "Checked first: they agree." in page
    assert "Goal: peak of fast at most 0.70× that of slow; it is 0.75×, NOT met." in page
    assert "Goal: peak of fast at most 0.80× that of slow; it is 0.75×, met." in page


def test_a_goal_that_must_be_met_is_the_exit_status(tmp_path: Path) -> None:
    assert run(replace(declared([]), must_meet=True), tmp_path, "")[0] == 1
    met = replace(declared([]), must_meet=True, goals=lambda sizes: (Goal("fast", "slow", 0.8, "peak"),))
    assert run(met, tmp_path, "")[0] == 0


def test_what_is_wrong_is_not_timed(tmp_path: Path) -> None:
    called: list[str] = []
    with pytest.raises(SystemExit, match="no time reported"):
        run(declared(called), tmp_path, "--size -1")
    assert not called and not list(tmp_path.iterdir())
    run(declared(called), tmp_path, "--kind one --variant fast")
    assert called == ["check", *["fast"] * 4]
    with pytest.raises(SystemExit, match="expected some of slow, fast, got other"):
        run(declared(called), tmp_path, "--variant other")


def test_a_variant_that_is_refused_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    called: list[str] = []
    found: dict[str, Rows] = {"slow": {}, "fast": {"refused": "it is wrong"}}  # type: ignore[dict-item]
    monkeypatch.setattr(runner, "alone", lambda benchmark, sizes, variant, threads: found[variant])
    run(replace(declared(called), alone=lambda sizes, variant: {}), tmp_path, "--kind one")
    assert called == ["check", *["slow"] * 4]
    rows = json.loads((tmp_path / "weights-3.json").read_text())["cases"][0]["rows"]
    assert rows["fast"] == {"peak": 3.0, "refused": "it is wrong"} and rows["slow"]["steps"] == 3


def test_variants_take_turns() -> None:
    """Nobody always follows the same other one, and the first round is not timed."""
    called: list[str] = []
    steps: dict[str, Callable[[], object]] = {name: partial(called.append, name) for name in "abc"}
    taken = runner.take_turns(steps, 0.0, WALL)
    assert "".join(called) == "abc" + "abc" + "bca" + "cab"
    assert [len(times) for times in taken.values()] == [3, 3, 3]
    assert [len(times) for times in runner.take_turns(steps, 0.0, PROCESSOR, 20).values()] == [18, 18, 18]


@pytest.fixture
def _no_stand_in_stays() -> Iterator[None]:
    """One benchmark puts something in the place of Triton where it is missing, which no other test should find."""
    with mock.patch.dict(sys.modules):
        yield


@pytest.mark.usefixtures("_no_stand_in_stays")
def test_the_list_has_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["--list"]) == 0
    said = capsys.readouterr().out
    for name in (*runner.NAMES, *runner.OTHERS):
        assert f"{name} " in said
    for name in runner.NAMES:
        benchmark = runner.module(name).BENCHMARK
        assert benchmark.name == name
        runner.parser(benchmark).parse_args([])
    assert "goal: time of ckptfused inputs at most 0.70× that of torch.utils.checkpoint" in said
    assert command(["step-tame"]) == 2
    said = capsys.readouterr().err
    assert "expected one of step, encoder-step" in said and "did you mean step-time?" in said


def test_what_was_measured_before_it_was_ended_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(benchmark: object, sizes: object, variant: str, threads: int) -> dict[str, float]:
        if variant == "fast":
            raise KeyboardInterrupt
        return {"saved": 2.0}

    monkeypatch.setattr(runner, "alone", alone)
    called: list[str] = []
    benchmark = replace(declared(called), alone=lambda sizes, variant: {})
    assert run(benchmark, tmp_path, "--kind one two")[0] == 130
    (case,) = json.loads((tmp_path / "weights-3.json").read_text())["cases"]
    assert case["rows"].keys() == {"slow", "predicted"} and case["rows"]["slow"]["saved"] == 2.0 and case["ended"]
    assert called == ["check"]  # neither timed nor followed by another case
    written = (tmp_path / "weights-3.json").read_text()
    with pytest.raises(KeyboardInterrupt):  # nothing measured, nothing overwritten
        run(benchmark, tmp_path, "--kind one --variant fast")
    assert (tmp_path / "weights-3.json").read_text() == written


@pytest.mark.parametrize(
    ("words", "wrong"),
    [(["step", "--bugdet", "5"], "--bugdet; did you mean --budget?"), (["step-time", "--typo=1"], "--typo")],
)
def test_an_option_of_no_command_is_refused_before_an_import(words: list[str], wrong: str) -> None:
    code = "import sys; from benchmarks.__main__ import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["2", "False"]
    assert f"no command has the option {wrong}" in run.stderr


def test_what_is_no_option_is_not_refused() -> None:
    assert foreign(["compare", "a.json", "--", "--b.json"]) is None
    assert foreign(["step", "--dtype", "bfloat16", "--bud=5", "--variant=--x"]) is None
    assert {"--size", "--plot", "--porcelain"} & options() == {"--size"}


@pytest.mark.usefixtures("_no_stand_in_stays")
def test_every_option_is_known_without_an_import() -> None:
    found = options()
    for name in runner.NAMES:
        assert set(runner.parser(runner.module(name).BENCHMARK)._option_string_actions) - {"-h"} <= found

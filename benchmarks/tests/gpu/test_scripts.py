"""Every measurement for a GPU, in small on the CPU: commands are parsed, code paths run, files written."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ops, row_ops
from benchmarks.gpu import attention, block, block_checks, grid, isolated, micro, models, profile, smoke
from benchmarks.gpu.parts import MEASURED
from benchmarks.gpu.summary import results, summary
from ckptfused import cost

pytestmark = pytest.mark.once

STEM = "day_chip"
NAMES = ("smoke", "block", "micro", "attention", "profile", "grid", "models")


def in_this_process(name: str, words: Sequence[str], seconds: float, more: dict[str, str] | None = None) -> Any:
    """The same as isolated.run, without the seconds that a process takes to start."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(sys, "argv", list(words[2:]))
        for variable, value in (more or {}).items():
            patch.setenv(variable, value)
        try:
            importlib.import_module(words[2]).main()
        except SystemExit as error:
            return isolated.Ended(name, {}, str(error))
    return isolated.Ended(name, json.loads(said.getvalue().split(isolated.MARK)[-1]))


def each_in_this_process(module: str, names: Any, options: Any, at_once: int, seconds: float) -> Iterator[Any]:
    for name in names:
        yield in_this_process(name, isolated.command(module, name, options), seconds)


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "run", in_this_process)
    monkeypatch.setattr(isolated, "run_each", each_in_this_process)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all scripts wrote; those with many processes do the work of one or two of them here."""
    folder = tmp_path_factory.mktemp("gpu")
    options = ["--device", "cpu", "--tiny", "--seconds", "0.1", "--out", str(folder), "--stem", STEM]
    few = (
        (smoke, "CHECKS", {name: smoke.CHECKS[name] for name in ("random state and masks", "attention with dropout")}),
        (micro, "OP_NAMES", ("glu_forward", "cross_entropy_forward")),
        (grid, "ATTENTION", ("flash",)),
        (models, "NAMES", ["qwen3-0.6b, LoRA"]),
    )
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, for peft
        patch.setattr(isolated, "run", in_this_process)
        patch.setattr(isolated, "run_each", each_in_this_process)
        patch.setattr(sys, "argv", ["script", *options])
        for module, name, value in few:
            patch.setattr(module, name, value)
        for module in (smoke, block, micro, attention, profile, grid, models):
            module.main()
    return folder


@pytest.mark.parametrize("case", NAMES)
def test_a_result_file(out: Path, case: str) -> None:
    text = (out / f"{STEM}_{case}.json").read_text()
    assert str(out) not in text
    result = json.loads(text)
    assert result["case"] == case
    assert not result["failed"]
    assert {"commit", "torch", "ckptfused", "cpu", "command"} <= result["environment"].keys()
    assert all({"name", "value", "goal", "met", "ideal"} <= goal.keys() for goal in result["goals"])


def shape_of(value: Any) -> Any:
    """What a file consists of: names of fields, and of the first of each list."""
    if isinstance(value, dict):
        return {name: shape_of(one) for name, one in value.items()}
    return [shape_of(one) for one in value[:1]] if isinstance(value, list) else None


@pytest.mark.parametrize("case", ["smoke", "block", "micro", "attention", "profile"])
def test_the_canned_day_is_what_scripts_write(out: Path, case: str) -> None:
    """Field by field, but for what only a GPU leaves, or what is named after what was measured; of variants and kernels
    the canned day has some."""
    day = json.loads((Path(__file__).parent / "canned.json").read_text())
    canned, found = day[case], json.loads((out / f"{STEM}_{case}.json").read_text())
    assert {"case", "environment", *canned} == found.keys()
    assert {"command", *day["environment"]} == found["environment"].keys() | {"gpu"}
    some: tuple[str, ...] = ()
    if case == "block":
        some = ("milliseconds", "saved bytes predicted")
        assert canned["goals"][0].keys() == found["goals"][0].keys()
        assert {goal["name"] for goal in canned["goals"]} == {goal["name"] for goal in found["goals"]}
    if case == "micro":
        assert shape_of(canned["ops"]) == shape_of(found["ops"])
    if case == "attention":
        some = ("cublas",)
        assert canned["attention"][0].keys() == found["attention"][0].keys()
    if case == "profile":
        some = ("variants",)
        assert shape_of(canned["variants"]["eager"]) == shape_of(found["variants"]["eager"])
    for name in some:
        assert canned[name].keys() <= found[name].keys()


def test_times_are_measured_where_no_ideal_is_known(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def fails(*call: Any) -> Any:
        raise RuntimeError("no kernel for meta tensors")

    monkeypatch.setattr(block.goals, "ideals", fails)
    assert block.predicted(block.TINY, "cpu").milliseconds == {}
    assert "no ideal times: no kernel for meta tensors" in capsys.readouterr().out


def test_the_page_has_every_time(out: Path) -> None:
    found = results(STEM, out, MEASURED)
    assert found.keys() == set(NAMES)
    page = summary("a chip", {}, found)
    for text in ("glu_forward", "eager checkpoint pinned", "cuBLAS tile's dW, float32", "| flash | 4KiB | all |"):
        assert text in page
    for text in (
        "2 checks are right",
        "| qwen3-0.6b, LoRA | convert, attention+mid |",
        "block: ckptfused inputs / ckptfused all",
    ):
        assert text in page


@pytest.mark.parametrize("name", [name for name in smoke.CHECKS if name not in row_ops.OP_NAMES])
def test_a_smoke_check(name: str) -> None:
    assert smoke.CHECKS[name](name, "cpu", True)


@pytest.mark.parametrize("name", row_ops.OP_NAMES)
def test_a_row_op_is_right_in_several_tiles(name: str) -> None:
    assert row_ops.check(name, getattr(row_ops.Make(ops.SMALL, "cpu"), name)()) < row_ops.limit(row_ops.DTYPE)


def test_a_smoke_check_that_fails_names_the_element(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(check: Any, given: Any, aux: Any, masks: Any, **how: Any) -> dict[str, Any]:
        found = true(check, given, aux, masks, **how)
        if masks is None:
            found["d ffn.down_w"][3, 5] += 9
        return found

    true = block_checks.gradients
    monkeypatch.setattr(block_checks, "gradients", off)
    with pytest.raises(SystemExit, match=r"^d ffn.down_w: error .* row 3 of 48, column 5 of 96 .*: got .*$"):
        smoke.CHECKS["block"]("block", "cpu", True)


def test_smoke_has_tiles_of_columns_and_of_rows() -> None:
    for name, axis in (("block in tiles of columns", 1), ("block in tiles of rows", 0)):
        check = block_checks.CHECKS[name]
        assert check.spec.ffn is not None
        size = (check.batch * check.tokens, check.spec.ffn.hidden)
        cut = cost.ffn_tiles(size[0], check.width, size[1], True, 2, check.spec.scratch, "cuda")
        assert cut[axis] < size[axis] and cut[1 - axis] == size[1 - axis], (name, cut)


def test_micro_runs_a_check_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--only", "rope_forward", "--untimed", "--small", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["micro", *words])
    micro.main()
    assert capsys.readouterr().out.startswith(isolated.MARK)


def test_micro_comes_back_from_an_op_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its file has the others, and what the runs after it said."""
    monkeypatch.setattr(micro, "OP_NAMES", ("glu_forward", "rope_forward"))
    monkeypatch.setattr(isolated, "sanitizer", lambda: "")
    error, true = "glu_forward: wrong result: worst at row 7", micro.check

    def broken(name: str, op: Any) -> float:
        if name == "glu_forward":
            raise SystemExit(error)
        return true(name, op)

    monkeypatch.setattr(micro, "check", broken)
    options = ["--device", "cpu", "--tiny", "--seconds", "0.1", "--out", str(tmp_path), "--stem", STEM]
    monkeypatch.setattr(sys, "argv", ["micro", *options])
    with pytest.raises(SystemExit, match="failed: glu_forward"):
        micro.main()
    result = json.loads((tmp_path / f"{STEM}_micro.json").read_text())
    assert [row["op"] for row in result["ops"]] == ["rope_forward"]
    assert result["failed"] == {"glu_forward": {"error": error, "each kernel waited for": error}}
    assert f"error: {error}" in summary("a chip", {}, {"micro": result})


@pytest.mark.parametrize("setting", ["as it is", "dropout", "CUDA graph"])
def test_a_model(setting: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--only", f"llama-3-8b, 4 layers, {setting}", "--tiny", "--device", "cpu", "--seconds", "0"]
    monkeypatch.setattr(sys, "argv", ["models", *words])
    models.main()
    result = json.loads(capsys.readouterr().out.split(isolated.MARK)[-1])
    assert not result["failed"]
    graph = setting == "CUDA graph"
    assert list(result["variants"]) == [name for name in models.VARIANTS if not graph or name != models.CHECKPOINTED]
    assert {row["said"] for row in result["variants"].values()} == {"", "2 of 2 layers fused"}


def test_a_wrong_converted_model_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    true = models.become

    def spoiled(model: Any, variant: str) -> str:
        if variant == "convert, inputs":
            model.model.norm.weight.data += 3
        return true(model, variant)

    monkeypatch.setattr(models, "become", spoiled)
    words = ["--only", "qwen3-0.6b, as it is", "--tiny", "--device", "cpu", "--seconds", "0"]
    monkeypatch.setattr(sys, "argv", ["models", *words])
    models.main()
    failed = json.loads(capsys.readouterr().out.split(isolated.MARK)[-1])["failed"]
    assert failed["convert, inputs"].startswith("wrong: loss and gradients' norm")


def test_ncu_looks_at_the_worst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The four row kernels that reach least, and attention; with an ncu that only says what it was called with."""
    program = tmp_path / "ncu"
    program.write_text('#!/bin/sh\necho "==PROF== noise"\necho "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    shares = {name: 0.5 + 0.01 * index for index, name in enumerate(reversed(row_ops.OP_NAMES))}
    ops = [{"op": name, "of copy": share} for name, share in shares.items()]
    (tmp_path / f"{STEM}_micro.json").write_text(json.dumps({"ops": ops}))
    options = micro.parser("").parse_args(["--out", str(tmp_path), "--stem", STEM])
    commands = profile.counted(options)
    assert list(commands) == ["attention", *row_ops.OP_NAMES[: -profile.COUNTED - 1 : -1]]
    for name, words in commands.items():
        (line,) = profile.ncu(name, words, 20)
        kind = "regex:^attention_" if name == "attention" else "regex:ckptfused::"
        assert "--clock-control none --kernel-name-base demangled --launch-count 4 --section SpeedOfLight" in line
        assert f"--kernel-name {kind} {sys.executable} -m benchmarks.gpu." in line
    options.stem = "another"
    assert list(profile.counted(options)) == ["attention", *profile.WORST]


def test_the_worst_are_ops() -> None:
    assert set(profile.WORST) <= set(row_ops.OP_NAMES) and len(profile.WORST) == profile.COUNTED

"""The demo trains, compares, and fails when it should."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ckptfused.cli import main, models
from ckptfused.cli.demo import command as demo_command
from ckptfused.cli.demo import data, verdict, worker
from ckptfused.cli.demo.job import REORDERED, Job, Result

JOB = Job(
    variant="plain",
    shape=models.LayerShape(d_model=64, nhead=2, dim_feedforward=96, layers=2),
    steps=20,
    batch=2,
    tokens=48,
    learning_rate=1e-3,
    dtype="float32",
    seed=0,
    threads=1,
    device="cpu",
    data=None,
)
SMALL = [
    *("--steps", "8", "--batch", "2", "--tokens", "40", "--d-model", "32", "--heads", "2"),
    *("--kv-heads", "1", "--hidden", "48", "--layers", "2"),
]


def losses(job: Job, monkeypatch: pytest.MonkeyPatch, twist: float = 0.0) -> list[float]:
    """The loss curve of a job run in this process, one weight's gradient misdirected by ``twist``."""
    records: list[dict[str, float]] = []
    build = worker.built_decoder

    def built(job: Job) -> models.Decoder:
        model = build(job)
        if twist:
            weight = model.get_parameter("layers.1.linear2.weight")
            weight.register_hook(lambda gradient: gradient + twist * gradient.flip(0))
        return model

    threads = torch.get_num_threads()
    with monkeypatch.context() as patch:
        patch.setattr(worker, "emit", records.append)
        patch.setattr(worker, "built_decoder", built)
        worker.train(job)
    torch.set_num_threads(threads)
    return [record["loss"] for record in records if "loss" in record]


@pytest.mark.slow
def test_curves_agree_within_rounding_and_a_small_fault_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = losses(JOB, monkeypatch)
    reordered = losses(replace(JOB, variant=REORDERED), monkeypatch)
    checkpointed = losses(replace(JOB, variant="torch.utils.checkpoint"), monkeypatch)
    assert plain[-1] < plain[0] - 0.3
    assert verdict.identical(checkpointed, plain) is None
    assert verdict.within_rounding(checkpointed, plain, reordered) is None
    assert verdict.within_rounding(losses(JOB, monkeypatch, twist=0.02), plain, reordered) is not None


def test_reordered_is_the_same_function() -> None:
    tokens, targets = data.batch(data.load_corpus(None, 1000), step=3, size=2, tokens=24, seed=0)
    job = replace(JOB, dtype="float64")
    plain, other = (worker.built_decoder(replace(job, variant=name)).double() for name in ("plain", REORDERED))
    assert not torch.equal(plain.embedding.weight, other.embedding.weight)
    # cross entropy is taken in float32; the logits feed it in float64, so only its own rounding is left
    torch.testing.assert_close(plain(tokens, targets), other(tokens, targets), rtol=2.0**-22, atol=0.0)


def test_what_frequencies_of_bytes_cost() -> None:
    assert data.entropy(torch.arange(256, dtype=torch.uint8)) == pytest.approx(math.log(256))
    assert data.entropy(torch.zeros(9, dtype=torch.uint8)) == 0
    assert 2.9 < data.entropy(data.load_corpus(None, 1000)) < 3.4


def test_it_learns_more_than_frequencies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model, a text of words in no order: within 150 steps it knows which letters follow which."""
    words = ["checkpoint", "tensor", "module", "saved", "kernel", "x"]
    order = torch.randint(len(words), (4000,), generator=torch.Generator().manual_seed(0))
    corpus = torch.tensor(list(" ".join(words[i] for i in order.tolist()).encode()), dtype=torch.uint8)
    monkeypatch.setattr(data, "load_corpus", lambda path, minimum: corpus)
    job = replace(JOB, variant="ckptfused inputs", steps=150, batch=8, tokens=32, learning_rate=8e-3)
    assert losses(job, monkeypatch)[-1] < 0.5 * data.entropy(corpus)


def test_variants_start_from_equal_weights() -> None:
    states = []
    for variant in models.VARIANTS:
        state = worker.built_decoder(replace(JOB, variant=variant)).state_dict()
        states.append({name.replace(".block.", "."): value for name, value in state.items()})
    for other in states[1:]:
        assert other.keys() == states[0].keys()
        assert all(torch.equal(value, other[name]) for name, value in states[0].items())


def test_verdict_names_the_step() -> None:
    assert verdict.identical([1.0, 2.0], [1.0, 2.0]) is None
    assert "step 1" in (verdict.identical([1.0, 2.0], [1.0, 2.0 + 2**-40]) or "")
    assert "step 0" in (verdict.identical([float("nan")], [float("nan")]) or "")
    plain, reordered = [4.0] * 12, [4.0 + 1e-6] * 12
    assert verdict.within_rounding([4.0 + 1.5e-5] * 12, plain, reordered) is None
    assert "step 0" in (verdict.within_rounding([4.1] * 12, plain, reordered) or "")
    assert verdict.within_rounding([float("nan")] * 12, plain, reordered) is not None


def train_here(job: Job, console: object) -> Result:
    """What `demo_command.train` does, without a process of its own."""
    result, threads = Result(job.variant), torch.get_num_threads()
    with mock.patch.object(worker, "emit", result.add):
        worker.train(job)
    torch.set_num_threads(threads)
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [pytest.param([], marks=pytest.mark.once, id="plain"), pytest.param(["--dropout", "0.1"], id="dropout")],
)
def test_demo_runs(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, apart = demo_command.train, () if options else ("ckptfused inputs",)

    def train(job: Job, console: Any) -> Result:  # that a variant has a process of its own shows with one of them
        return (alone if job.variant in apart else train_here)(job, console)

    monkeypatch.setattr(demo_command, "train", train)
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    out = tmp_path / "out"
    status = main(["demo", *SMALL, *options, "--data", str(text), "--out", str(out)])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((out / "demo.json").read_text())["results"]
    assert (REORDERED in results) is not bool(options)
    assert results["ckptfused inputs"]["losses"] == results["ckptfused all"]["losses"]
    assert results["ckptfused inputs"]["text"] == results["ckptfused all"]["text"] != ""
    assert "fox" in captured.out or "the" in captured.out  # what they write
    saved = {name: result["saved_bytes"] for name, result in results.items()}
    assert saved["ckptfused inputs"] < saved["ckptfused all"] < saved["plain"]


@pytest.mark.parametrize(
    ("variant", "message"),
    [("ckptfused inputs", "same floats"), ("ckptfused", "more than rounding explains")],
)
def test_demo_fails_with_a_message(
    variant: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(job: Job, console: object) -> Result:
        shift = 1e-3 if job.variant.startswith(variant) else 0.0
        return Result(job.variant, [4.0 + shift, 3.0], [0.1, 0.1], 10, 10)

    monkeypatch.setattr(demo_command, "train", train)
    assert main(["demo", *SMALL, "--out", str(tmp_path)]) == 1
    assert message in capsys.readouterr().err


def test_models_that_write_different_texts_are_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(job: Job, console: object) -> Result:
        return Result(job.variant, [4.0, 3.0], [0.1, 0.1], 10, 10, text=job.variant)

    monkeypatch.setattr(demo_command, "train", train)
    assert main(["demo", *SMALL, "--out", str(tmp_path)]) == 1
    assert "must write the same text" in capsys.readouterr().err


def test_without_what_it_draws_with_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["demo"]) == 1
    assert "needs rich" in (said := capsys.readouterr().err)
    assert "pip install rich matplotlib" in said and "ckptfused[" not in said


@pytest.mark.parametrize(
    ("visible", "architectures", "device"),
    [(True, ["sm_90"], "cuda"), (True, [], "cpu"), (False, ["sm_90"], "cpu"), (False, [], "cpu")],
)
def test_default_device(visible: bool, architectures: list[str], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU, only where there is one and the extension has kernels for it."""
    info = demo_command.ckptfused.build_info() | {"cuda_architectures": architectures}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible)
    monkeypatch.setattr(demo_command.ckptfused, "build_info", lambda: info)
    assert demo_command.default_device() == device


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dropout", "1.5"], "expected a probability in [0, 1), got 1.5"),
        (["--steps", "0"], "--steps: expected at least 1, got 0"),
        (["--heads", "5"], "expected a multiple of twice the heads (10), got 128"),
        (["--kv-heads", "3"], "--kv-heads: expected a divisor of 4 heads, got 3"),
        (["--kv-heads", "0"], "--kv-heads: expected a divisor of 4 heads, got 0"),
        (["--data", "missing"], "--data: expected a readable file, got missing (No such file or directory)"),
        (["--data", "/"], "--data: expected a readable file, got / (Is a directory)"),
        (["--data", os.devnull], "has 0 bytes; one batch needs at least 128"),
        (["--out", os.devnull], "--out: expected a folder that can be written"),
        (["--learning-rate", "nan"], "--learning-rate: expected a finite number above 0, got nan"),
    ],
)
def test_bad_options_are_explained(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, before a process is started."""
    monkeypatch.setattr(demo_command.subprocess, "Popen", None)
    assert main(["demo", *options]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert message in said.err

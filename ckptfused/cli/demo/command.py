"""The demo at work: the variants train, each in a process of its own, and are compared."""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile

import torch

import ckptfused
from ckptfused.cli.demo import data, verdict
from ckptfused.cli.demo.job import REORDERED, Job, Result
from ckptfused.cli.errors import CommandError
from ckptfused.cli.models import VARIANTS, LayerShape
from ckptfused.sizes import counted


def run(arguments: argparse.Namespace) -> int:
    arguments.device = arguments.device or default_device()
    if arguments.device == "cuda" and default_device() != "cuda":
        why = "ckptfused was built without CUDA kernels" if torch.cuda.is_available() else "PyTorch sees none"
        raise CommandError(f"--device: expected cpu, or a GPU to run on, got cuda; {why}")
    guess = data.entropy(data.load_corpus(arguments.data, minimum=2 * arguments.tokens))
    try:
        from rich.console import Console

        from ckptfused.cli.demo import report
    except ModuleNotFoundError as error:
        raise CommandError(f"needs {error.name}; install what it draws with: pip install rich matplotlib") from error
    console = Console()
    shape = shape_of(arguments)
    size = shape.layers * shape.parameters_per_layer + 2 * 256 * shape.d_model
    console.print(
        f"A byte-level decoder, {size / 1e6:.1f} M parameters, {arguments.dtype}, dropout {arguments.dropout}; "
        f"{counted(arguments.steps, 'step')} of {arguments.batch} × {counted(arguments.tokens, 'byte')} from "
        f"{arguments.data or 'the Python standard library'}; {counted(arguments.threads, 'thread')}.\n"
        f"Guessing by how frequent each byte is costs {guess:.2f} nats a byte."
    )
    if arguments.device == "cuda":
        console.print(f"On {torch.cuda.get_device_name()}.")
    names = [*VARIANTS] if arguments.dropout else [*VARIANTS, REORDERED]
    results = {name: train(job_of(name, shape, arguments), console) for name in names}

    shown = [results[name] for name in VARIANTS]
    console.print(report.results_table(shown))
    console.print(report.texts(shown))
    report.results_picture(shown, arguments.out / "demo.png", guess)
    record = {name: vars(result) for name, result in results.items()}
    (arguments.out / "demo.json").write_text(
        json.dumps({"options": vars(arguments), "guess": guess, "results": record}, default=str)
    )
    console.print(f"Picture: {arguments.out / 'demo.png'}")
    for line in judge(results):
        console.print(line, highlight=False)
    return 0


def default_device() -> str:
    """The GPU, where PyTorch sees one and the extension has kernels."""
    return "cuda" if torch.cuda.is_available() and ckptfused.build_info()["cuda_architectures"] else "cpu"


def shape_of(arguments: argparse.Namespace) -> LayerShape:
    return LayerShape(
        d_model=arguments.d_model,
        nhead=arguments.heads,
        num_kv_heads=arguments.kv_heads,
        dim_feedforward=arguments.hidden,
        layers=arguments.layers,
        residual_dropout=arguments.dropout,
    )


def job_of(variant: str, shape: LayerShape, arguments: argparse.Namespace) -> Job:
    return Job(
        variant=variant,
        shape=shape,
        steps=arguments.steps,
        batch=arguments.batch,
        tokens=arguments.tokens,
        learning_rate=arguments.learning_rate,
        dtype=arguments.dtype,
        seed=arguments.seed,
        threads=arguments.threads,
        device=arguments.device,
        data=str(arguments.data) if arguments.data else None,
    )


def train(job: Job, console) -> Result:
    """Runs one variant in a process of its own, so that its peak memory is its own."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    command = [sys.executable, "-m", "ckptfused.cli.demo.worker", job.to_json()]
    result = Result(job.variant)
    with tempfile.TemporaryFile("w+") as complaints, Progress(*columns, console=console) as progress:
        bar = progress.add_task(job.variant, total=job.steps)
        environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ}  # repeatable products on a GPU
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=complaints, text=True, env=environment
        ) as process:
            for line in process.stdout or ():
                record = json.loads(line)
                result.add(record)
                if "loss" in record:
                    progress.update(bar, advance=1, description=f"{job.variant}  {record['loss']:.3f}")
        complaints.seek(0)
        tail = "".join(collections.deque(complaints, maxlen=20))
    if process.returncode != 0:
        raise CommandError(f"the process training {job.variant!r} ended with status {process.returncode}:\n{tail}")
    return result


def judge(results: dict[str, Result]) -> list[str]:
    """What was shown, one line each; raises if a curve is not what it must be."""
    everything, inputs = results["ckptfused all"].losses, results["ckptfused inputs"].losses
    parted = verdict.identical(everything, inputs)
    if parted:
        raise CommandError(f"the two ckptfused loss curves must be the same floats and are not; {parted}")
    if results["ckptfused all"].text != results["ckptfused inputs"].text:
        raise CommandError("the two ckptfused models must write the same text and do not; see demo.json")
    lines = [
        f"The two ckptfused curves are the same {counted(len(inputs), 'float')}, and both models write the same text."
    ]
    if REORDERED not in results:
        return [*lines, "With dropout the masks differ from PyTorch's, so the plain curve is not compared."]
    plain, reordered = results["plain"].losses, results[REORDERED].losses
    left = verdict.within_rounding(inputs, plain, reordered)
    if left:
        raise CommandError(f"the ckptfused curves leave the plain one by more than rounding explains; {left}")
    first = min(verdict.FIRST, len(plain))
    ours = max(abs(a - b) for a, b in zip(inputs[:first], plain, strict=False))
    limit = verdict.rounding_bounds(plain, reordered)[first - 1]
    return [
        *lines,
        f"For {counted(first, 'step')} they stay within {ours:.1e} of the plain curve, where rounding explains up to "
        f"{limit:.1e} (plain layers once more, with renumbered units); later, training amplifies both alike.",
    ]

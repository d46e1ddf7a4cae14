"""Peak memory and step time of a Llama under the policies that guides to checkpointing compare, on the CPU.

None, each layer, every 2, every 4, one half alone, segments, the whole model, offload, and each preset of what a fused
layer keeps; Hugging Face's own checkpointing beside them; all with the chunked loss, so that the layers set the peak.
`make pictures` draws it. Needs transformers.
"""

from __future__ import annotations

import warnings
from typing import Any

import ckptfused
from benchmarks.benchmark import MIB, Benchmark, Column, Rows, Steps, ratio
from benchmarks.llama import LlamaSizes, LlamaStep, batch_of, described, make, same_losses
from ckptfused import CheckpointPolicy
from ckptfused.spec import KEEP_PRESETS

NONE, THEIRS = "none", "Hugging Face's checkpointing"


def policies(layers: int) -> dict[str, CheckpointPolicy]:
    """By the name in the table; of `THEIRS` the layers are as they were, and checkpoint themselves."""
    half = max(1, layers // 4)
    found = {
        NONE: CheckpointPolicy.none(loss="chunked"),
        THEIRS: CheckpointPolicy.none(loss="chunked"),
        "every 2": CheckpointPolicy.every(2, loss="chunked"),
        "every 4": CheckpointPolicy.every(4, loss="chunked"),
        "selective attention": CheckpointPolicy.selective("attention", loss="chunked"),
        "selective ffn": CheckpointPolicy.selective("ffn", loss="chunked"),
        f"{half} segments": CheckpointPolicy.segments(half, loss="chunked"),
        "whole model": CheckpointPolicy.whole_model(loss="chunked"),
        "inputs, offloaded": CheckpointPolicy.uniform(offload=True, loss="chunked"),
    }
    for keep in KEEP_PRESETS:
        if not keep.startswith("all but"):  # those are the selective ones
            found[f'keep="{keep}"'] = CheckpointPolicy.uniform(keep, loss="chunked")
    return found


def model_of(name: str, policy: CheckpointPolicy, sizes: LlamaSizes) -> Any:
    """The model as this variant trains it."""
    model: Any = make(sizes)
    if name == THEIRS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of its new name, which older versions do not have
            model.gradient_checkpointing_enable()
    ckptfused.convert(model, policy=policy)
    return model


def variants(sizes: LlamaSizes) -> Steps:
    batch = batch_of(sizes)
    return {name: LlamaStep(model_of(name, policy, sizes), batch) for name, policy in policies(sizes.layers).items()}


def figures(sizes: LlamaSizes, steps: Any) -> Rows:
    return {name: {"peak": step.peak(), "weights": step.weights()} for name, step in steps.items()}


def above(row: dict[str, Any]) -> float:
    """MiB at the peak of a step beside the weights."""
    return (row["peak"] - row["weights"]) / MIB


BENCHMARK = Benchmark(
    name="policies",
    doc=__doc__,
    sizes=LlamaSizes(),
    variants=variants,
    check=lambda sizes, steps: same_losses(steps, NONE),
    figures=figures,
    columns=(
        Column("memory, MiB", lambda row, rows: f"{above(row):,.1f}"),
        Column("of none", lambda row, rows: f"{above(row) / above(rows[NONE]):.2f}×" if NONE in rows else ""),
        ratio("time of none", NONE),
    ),
    stem=lambda sizes: f"policies-{sizes.layers}x{sizes.width}",
    shape=lambda sizes, rows: described(
        sizes,
        "forward and backward, chunked loss. Memory: the peak above the weights, gradients included. What is on the "
        "CPU stays there, so offloading its inputs changes nothing here",
    ),
    budget=120.0,
)

"""Peak memory and step time of a Llama under the policies that guides to checkpointing compare, on the CPU.

None, each layer, every 2, every 4, one half alone, segments, the whole model, offload, and each preset of what a fused
layer keeps; Hugging Face's own checkpointing beside them; all with the chunked loss, so that the layers set the peak.
Losses are compared first; all variants take turns within one run. Writes
benchmarks/results/policies-<layers>x<width>[-<label>].json and .md. Needs transformers.

    python benchmarks/policies.py && make pictures
"""

from __future__ import annotations

import sys
import warnings
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


import ckptfused
from benchmarks.commands import page, times
from benchmarks.llama import MIB, Sizes, batch_of, check_losses, command, make, peak_of, step_of
from benchmarks.step_time import summary, take_turns
from ckptfused import CheckpointPolicy
from ckptfused.spec import KEEP_PRESETS

NONE, THEIRS = "none", "Hugging Face's checkpointing"


def variants(layers: int) -> dict[str, CheckpointPolicy]:
    """By the name in the table; of `THEIRS` the layers are as they were, and checkpoint themselves."""
    half = max(1, layers // 4)
    policies = {
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
            policies[f'keep="{keep}"'] = CheckpointPolicy.uniform(keep, loss="chunked")
    return policies


def model_of(name: str, policy: CheckpointPolicy, sizes: Sizes, seed: int) -> Any:
    """The model as this variant trains it."""
    model: Any = make(sizes, seed)
    if name == THEIRS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of its new name, which older versions do not have
            model.gradient_checkpointing_enable()
    ckptfused.convert(model, policy=policy)
    return model


def measure(sizes: Sizes, arguments: Namespace) -> dict[str, Any]:
    """Checks, measures memory, then time."""
    batch = batch_of(sizes, arguments.seed)
    models, peaks, losses = {}, {}, {}
    for name, policy in variants(sizes.layers).items():
        models[name] = model_of(name, policy, sizes, arguments.seed)
        peaks[name] = peak_of(models[name], batch)
        losses[name] = models[name](**batch).loss.item()
    worst = check_losses(losses, NONE)
    taken = take_turns({name: step_of(one, batch) for name, one in models.items()}, arguments.budget)
    rows = {name: {"peak": peaks[name], "seconds": summary(taken[name])} for name in models}
    weights = sum(p.nbytes for p in models[NONE].parameters())
    return {"sizes": asdict(sizes), "rows": rows, "weights": weights, "largest_loss_difference": worst}


def above(result: dict[str, Any], name: str) -> float:
    """MiB at the peak of a step beside the weights."""
    return (result["rows"][name]["peak"] - result["weights"]) / MIB


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    sizes, none = result["sizes"], result["rows"][NONE]["seconds"]["median"]
    lines = [
        f"# Policies of a Llama with {sizes['layers']} layers, {sizes['width']} wide",
        "",
        f"Float32, {sizes['batch']} × {sizes['tokens']} tokens, forward and backward, chunked loss. Memory: the peak "
        "above the weights, gradients included.",
        "",
        "| policy | memory, MiB | of none | median s | p20 | p80 | of none |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in result["rows"].items():
        memory, share = above(result, name), above(result, name) / above(result, NONE)
        ratio = row["seconds"]["median"] / none
        lines.append(f"| {name} | {memory:,.1f} | {share:.2f}× | {times(row['seconds'])} | {ratio:.2f}× |")
    lines += ["", "What is on the CPU stays there, so offloading its inputs changes nothing here."]
    return page(lines, result)


def main() -> None:
    command(__doc__, 120, "policies", measure, markdown)


if __name__ == "__main__":
    main()

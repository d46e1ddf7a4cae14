"""Times a training step (forward and backward) of one tiny layer, where nearly all is host time: Python and dispatch.

x is [1, 8, 32] float32, on one thread. Variants take turns, one step each; the median of the processor time counts, so
that a busy machine falls on all of them alike. Writes benchmarks/results/host-time[-<label>].json and .md.

    python benchmarks/host_time.py
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

import ckptfused
from benchmarks import environment
from benchmarks.commands import RESULTS, page
from ckptfused import FusedCheckpointBlock

SHAPE, HEADS, HIDDEN = (1, 8, 32), 4, 64
ENCODER, BLOCK, LLAMA_BLOCK = "nn.TransformerEncoderLayer", "FusedCheckpointBlock", "FusedCheckpointBlock.llama"
ENCODER_CONVERTED, LLAMA, LLAMA_CONVERTED = f"{ENCODER}, converted", "LlamaDecoderLayer", "LlamaDecoderLayer, converted"
AGAINST = {BLOCK: ENCODER, LLAMA_BLOCK: ENCODER, ENCODER_CONVERTED: ENCODER, LLAMA_CONVERTED: LLAMA}
"""What each variant is compared with."""
Step = Callable[[Tensor], Any]


def variants() -> dict[str, Step]:
    """A forward of each variant. Those of Hugging Face's layer only where transformers is installed."""
    width = SHAPE[-1]
    encoder = nn.TransformerEncoderLayer(width, HEADS, HIDDEN, 0.0, batch_first=True)
    converted = copy.deepcopy(encoder)
    ckptfused.convert(converted)
    found: dict[str, Step] = {
        ENCODER: encoder,
        BLOCK: FusedCheckpointBlock(width, HEADS, HIDDEN, 0.0, batch_first=True),
        LLAMA_BLOCK: FusedCheckpointBlock.llama(width, HEADS, HIDDEN),
        ENCODER_CONVERTED: converted,
    }
    try:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer
    except ImportError:
        return found
    sizes: dict[str, Any] = {"hidden_size": width, "num_attention_heads": HEADS, "intermediate_size": HIDDEN}
    config = LlamaConfig(**sizes, attn_implementation="sdpa")  # type: ignore[call-arg]
    table = torch.ones(1, SHAPE[1], width // HEADS)
    layer = LlamaDecoderLayer(config, 0)
    fused = copy.deepcopy(layer)
    ckptfused.convert(fused)
    found[LLAMA] = lambda x: layer(x, position_embeddings=(table, table))
    found[LLAMA_CONVERTED] = lambda x: fused(x, position_embeddings=(table, table))
    return found


def measure(rounds: int) -> dict[str, Any]:
    """Microseconds of processor time of each variant's step, in turns; the first tenth of the rounds is not timed."""
    x, steps = torch.randn(SHAPE, requires_grad=True), variants()
    dy = torch.randn(SHAPE)
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(rounds + rounds // 10):
        for name in names:
            x.grad = None
            before = time.process_time_ns()
            steps[name](x).backward(dy)
            if turn >= rounds // 10:
                times[name].append((time.process_time_ns() - before) / 1e3)
        names.append(names.pop(0))  # no variant always follows the same other one
    return {
        "shape": SHAPE,
        "rounds": rounds,
        "microseconds": {name: summary(values) for name, values in times.items()},
        "ratios": {
            name: statistics.median(times[name]) / statistics.median(times[plain])
            for name, plain in AGAINST.items()
            if name in times
        },
        "environment": environment.describe(),
    }


def summary(values: list[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile."""
    cuts = statistics.quantiles(values, n=5)
    return {"median": statistics.median(values), "p20": cuts[0], "p80": cuts[-1]}


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    lines = [
        "# Host time of a step",
        "",
        "| layer | median µs | p20 | p80 | of the plain layer's |",
        "|---|---|---|---|---|",
    ]
    for name, row in result["microseconds"].items():
        ratio = result["ratios"].get(name)
        times = " | ".join(f"{row[part]:.0f}" for part in ("median", "p20", "p80"))
        lines.append(f"| {name} | {times} | {'' if ratio is None else f'{ratio:.3f}'} |")
    lines += ["", f"Forward and backward of x {list(result['shape'])} float32, processor time, one thread; "]
    lines[-1] += f"{result['rounds']} rounds, the variants in turns."
    return page(lines, result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--label", default="", help="ends the name of the result files: the processor, say")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    result = measure(arguments.rounds)
    stem = "-".join(filter(None, ("host-time", arguments.label)))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"{stem}.json").write_text(json.dumps(result, indent=2) + "\n")
    (arguments.out / f"{stem}.md").write_text(markdown(result))
    print(markdown(result), flush=True)


if __name__ == "__main__":
    main()

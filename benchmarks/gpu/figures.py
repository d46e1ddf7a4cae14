"""What documents say of a GPU: a sentence and a table, from one folder of results and from nothing else.

python -m benchmarks.gpu.figures benchmarks/results --stem 2026-01-31_nvidia-h200
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.tables import table

ROWS = {
    "eager": "eager, as Hugging Face writes it",
    "eager checkpoint": "the same under `torch.utils.checkpoint`",
    "ckptfused inputs": '`keep="inputs"`',
    "ckptfused attention+mid": '`keep="attention+mid"`',
    "ckptfused attention+mid+qkv": '`keep="attention+mid+qkv"`',
    "ckptfused all": '`keep="all"`',
}


def sentence(block: dict[str, Any]) -> str:
    """The status line: where it ran, and what saving inputs only costs and gains there."""
    where, times = block["environment"], block["milliseconds"]
    gpu = where.get("gpu", {}).get("name", "a CPU")
    ours, eager, checkpointed = (
        times[name]["median"] for name in ("ckptfused inputs", "eager", "eager checkpoint")
    )  # fmt: skip
    return (
        f"On an {gpu} (torch {where['torch']}, commit {where['commit'][:7]}) a Llama-3-8B layer on {block['batch']} x "
        f"{block['tokens']} tokens that saves its inputs only takes {ours / eager:.2f} of the eager layer's step and "
        f"{ours / checkpointed:.2f} of that under `torch.utils.checkpoint`."
    )


def block_table(block: dict[str, Any]) -> str:
    """Times and bytes a token of the ways that documents compare."""
    tokens, base = block["batch"] * block["tokens"], block["milliseconds"]["eager"]["median"]
    rows: list[list[object]] = []
    for name, words in ROWS.items():
        if name not in block["milliseconds"]:
            continue
        median, used = block["milliseconds"][name]["median"], block["bytes"].get(name)
        sizes = [f"{used['saved'] / tokens:.0f}", f"{used['peak'] / 2**20:.0f}"] if used else ["", ""]
        rows.append([words, f"{median:.1f}", f"{median / base:.2f}", *sizes])
    return table(["layer", "ms", "of eager", "saved bytes a token", "peak MiB"], rows)


def kernel_lines(found: dict[str, dict[str, Any]]) -> list[str]:
    """Shares of a copy's bandwidth, and attention with dropout."""
    lines = []
    if ops := [row for row in found.get("micro", {}).get("ops", []) if row["goal"]]:
        least = min(ops, key=lambda row: row["of copy"])
        lines.append(
            f"Row kernels reach {100 * least['of copy']:.0f} % ({least['op'].replace('_', ' ')}) to "
            f"{100 * max(row['of copy'] for row in ops):.0f} % of a copy's bandwidth."
        )
    lines += [f"{goal['name']}: {goal['value']:.2f}." for goal in found.get("attention", {}).get("goals", [])]
    return lines


def figures(folder: Path, stem: str) -> str:
    """All that there is to quote of a folder."""
    paths = {name: folder / f"{stem}_{name}.json" for name in ("block", "micro", "attention")}
    found = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
    if "block" not in found:
        raise SystemExit(f"expected {paths['block'].name} in {folder}")
    return "\n\n".join([sentence(found["block"]), block_table(found["block"]), *kernel_lines(found)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stem", required=True, help="what the files' names begin with: <date>_<gpu>")
    options = parser.parse_args()
    print(figures(options.folder, options.stem))


if __name__ == "__main__":
    main()

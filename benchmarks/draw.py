"""Draws the documents' pictures from committed results, and writes their tables of measured figures.

A document quotes figures between two lines, `<!-- begin: NAME -->` and `<!-- end: NAME -->`. This command writes what
stands between them from benchmarks/results/ alone. Without the result the lines stay as they are.

    python benchmarks/draw.py            # or: make pictures
    python benchmarks/draw.py --check    # changes nothing; fails where a table is not that of its result
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.pictures import draw_bars, pyplot, saved, short  # noqa: E402
from ckptfused.profiler.plot import label_points  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
PICTURE, WHOLE_PICTURE = IMAGES / "encoder_step.svg", IMAGES / "whole_step.svg"
POLICIES_PICTURE = IMAGES / "policies.svg"
POLICIES = "policies-12x384"
PLANNED = "planned-steps-12x384"
ENCODER = "encoder-4x512x4096"
ENCODER_ROWS = {
    "nn.TransformerEncoderLayer": "`nn.TransformerEncoderLayer`",
    "under torch.utils.checkpoint": "… under `torch.utils.checkpoint`",
    "FusedCheckpointBlock": "… class swapped for `FusedCheckpointBlock`",
}
WHOLE = "whole-step-8x384x32768"
WHOLE_ROWS = {
    "Hugging Face": "Hugging Face",
    "its gradient checkpointing": "… its gradient checkpointing",
    "its gradient checkpointing, torch's chunked loss": "… and PyTorch's chunked loss",
    'convert(model, loss="chunked")': '`convert(model, loss="chunked")`',
}
# Label of a row -> result. The order is that of the table.
SPEED = {
    "Xeon with AMX, bfloat16": "llama-4x1024-bfloat16-sapphirerapids",
    "Xeon with AMX, float32": "llama-4x1024-float32-sapphirerapids",
    "Zen 4 (bf16 instructions), float32": "llama-4x1024-float32-zen4",
    "Zen 4, bfloat16": "llama-4x1024-bfloat16-zen4",
    "Cascade Lake, float32": "llama-4x1024-float32-cascadelake",
    "Cascade Lake, bfloat16": "llama-4x1024-bfloat16-cascadelake",
}


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB"


def encoder_table(page: Path) -> str:
    """Step time and memory of PyTorch's encoder layers in three variants, and the picture of them."""
    found = result(ENCODER)
    shape = found["shape"]
    lines = ["| one training step | time | peak memory |", "|---|---|---|"]
    for variant, label in ENCODER_ROWS.items():
        seconds, peak = found["seconds"][variant]["median"], found["peak_bytes"][variant]
        lines.append(f"| {label} | {seconds:.2f} s | {gigabytes(peak)} |")
    lines += [
        "",
        f"{shape['layers']} layers of width {shape['width']}, {shape['tokens']} tokens, {found['dtype']}, dropout "
        f"{shape['dropout']} (PyTorch's default), {found['environment']['threads']} cores; measured as "
        f"`benchmarks/results/{ENCODER}.md` says.",
        "",
        f"![Step time and peak memory of the three variants]({PICTURE.relative_to(page.parent).as_posix()})",
    ]
    return "\n".join(lines)


def whole_table(page: Path) -> str:
    """Whole training steps of a Llama, and the picture of them."""
    found = result(WHOLE)
    shape, peaks = found["shape"], found["peak_bytes"]
    lines = ["| one whole step of a Llama | time | peak above weights and gradients |", "|---|---|---|"]
    for variant, label in WHOLE_ROWS.items():
        seconds, peak = found["seconds"][variant]["median"], peaks[variant]["above_gradients"]
        lines.append(f"| {label} | {seconds:.2f} s | {peak / 2**20:,.0f} MiB |")
    lines += [
        "",
        f"{shape['layers']} layers of width {shape['width']}, vocabulary {shape['vocabulary']:,}, {shape['batch']} × "
        f"{shape['tokens']} tokens, {found['dtype']}, AdamW, {found['environment']['threads']} cores: "
        f"`benchmarks/results/{WHOLE}.md`.",
        "",
        f"![Step time and peak memory of the variants]({WHOLE_PICTURE.relative_to(page.parent).as_posix()})",
    ]
    return "\n".join(lines)


def speed_table(page: Path) -> str:
    """What a step of `ckptfused inputs` takes of the others' time, on the processors measured."""
    lines = ["| processor, type | plain | under `torch.utils.checkpoint` | result |", "|---|---|---|---|"]
    for label, name in SPEED.items():
        over = result(name)["inputs_over"]
        lines.append(
            f"| {label} | {over['plain']:.2f}× | {over['torch.utils.checkpoint']:.2f}× | "
            f"`benchmarks/results/{name}.md` |"
        )
    return "\n".join(lines)


SCRATCH = {dtype: f"ffn-scratch-8192x1024-{dtype}" for dtype in ("float32", "bfloat16")}


def scratch_table(page: Path) -> str:
    """Peak and time of a backward under limits of the FFN's scratch."""
    found = {dtype: result(name) for dtype, name in SCRATCH.items()}
    shape = found["float32"]["shape"]
    lines = ["| scratch | peak, float32 | time | peak, bfloat16 | time |", "|---|---|---|---|---|"]
    for limit in found["float32"]["seconds"]:
        row = [f"{limit} MiB"]
        for one in found.values():
            seconds = [one["seconds"][name]["median"] for name in (limit, next(iter(one["seconds"])))]
            row += [f"{one['peak_bytes'][limit] / 2**20:,.0f} MiB", f"{seconds[0] / seconds[1]:.2f}×"]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(
        [
            *lines,
            "",
            f"Backward of one block, C {shape['width']}, F {shape['hidden']}, {shape['tokens']:,} tokens, "
            f"{found['float32']['environment']['threads']} cores; the first row is in one piece. Measured as "
            f"{' and '.join(f'`benchmarks/results/{name}.md`' for name in SCRATCH.values())} say.",
        ]
    )


HEADS = {
    f"{vocabulary:,} classes, {dtype}": f"loss-head-2048x1024-{vocabulary}-{dtype}"
    for vocabulary in (32768, 128256)
    for dtype in ("float32", "bfloat16")
}


def heads_table(page: Path) -> str:
    """Forward and backward of the loss head alone beside PyTorch's logits as a whole."""
    plain, ours = "linear, cross_entropy", ("ckptfused", 'ckptfused, keep="inputs"')
    lines = ['| loss head | PyTorch\'s | its peak | `keep="gradients"` | `keep="inputs"` | result |']
    lines.append("|---|---|---|---|---|---|")
    for label, name in HEADS.items():
        found = result(name)
        seconds = {variant: found["seconds"][variant]["median"] for variant in (plain, *ours)}
        peaks = {variant: f"{found['peak_bytes'][variant] / 2**20:,.0f} MiB" for variant in seconds}
        cells = [f"{seconds[variant] / seconds[plain]:.2f}×, {peaks[variant]}" for variant in ours]
        row = [label, f"{seconds[plain]:.2f} s", peaks[plain], *cells, f"`benchmarks/results/{name}.md`"]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join([*lines, "", "Forward and backward of 2,048 tokens of width 1024, gradients included; 2 cores."])


def above_weights(found: dict[str, Any], name: str) -> float:
    """MiB at the peak of a step under a policy, beside the weights."""
    return (found["rows"][name]["peak"] - found["weights"]) / 2**20


def policies_table(page: Path) -> str:
    """Memory and step time of one model under the policies that guides compare, and the picture of them."""
    found = result(POLICIES)
    shape, rows = found["sizes"], found["rows"]
    lines = ["| policy | peak above weights | time |", "|---|---|---|"]
    for name, row in rows.items():
        lines.append(f"| {name} | {above_weights(found, name):,.1f} MiB | {row['seconds']['median']:.3f} s |")
    lines += [
        "",
        f"Llama of {shape['layers']} layers of width {shape['width']}, {shape['batch']} × {shape['tokens']} tokens, "
        f"float32, forward and backward, chunked loss, {found['environment']['threads']} cores; what is on the CPU "
        f"stays there, so offload changes nothing here. Measured as `benchmarks/results/{POLICIES}.md` says.",
        "",
        f"![Peak memory and step time of the policies]({POLICIES_PICTURE.relative_to(page.parent).as_posix()})",
    ]
    return "\n".join(lines)


def planned_table(page: Path) -> str:
    """What planned steps need and take, measured, beside the best policy made by hand that fits."""
    found = result(PLANNED)
    shape = found["sizes"]
    lines = ["| budget | measured peak | plan | best by hand that fits | |", "|---|---|---|---|---|"]
    for row in found["rows"]:
        budget, peak, own = row["budget"] / 2**20, row["measured"] / 2**20, row["seconds"]["median"]
        hand = "none fits | –" if row["best_by_hand"] is None else row["best_by_hand"]
        hand += "" if row["by_hand_seconds"] is None else f" | {row['by_hand_seconds']['median']:.3f} s"
        lines.append(f"| {budget:,.1f} MiB | {peak:,.1f} MiB ({peak / budget:.1%}) | {own:.3f} s | {hand} |")
    lines += [
        "",
        f"Llama of {shape['layers']} layers of width {shape['width']}, {shape['batch']} × {shape['tokens']} tokens, "
        f"float32, {found['environment']['threads']} cores, as `benchmarks/results/{PLANNED}.md` says.",
    ]
    return "\n".join(lines)


# By name: the result files that a table is made from, what makes it, and the pages that have it.
TABLES: dict[str, tuple[tuple[str, ...], Callable[[Path], str], tuple[Path, ...]]] = {
    "encoder-step": ((ENCODER,), encoder_table, (ROOT / "README.md", ROOT / "docs" / "index.md")),
    "whole-step": ((WHOLE,), whole_table, (ROOT / "README.md", ROOT / "docs" / "loss.md")),
    "ffn-scratch": (tuple(SCRATCH.values()), scratch_table, (ROOT / "docs" / "keep.md",)),
    "loss-head": (tuple(HEADS.values()), heads_table, (ROOT / "docs" / "loss.md",)),
    "policies": ((POLICIES,), policies_table, (ROOT / "docs" / "policies.md",)),
    "planned-steps": ((PLANNED,), planned_table, (ROOT / "docs" / "budget.md",)),
    "speed": (tuple(SPEED.values()), speed_table, (ROOT / "docs" / "keep.md",)),
}


def filled(name: str, page: Path) -> tuple[str, str]:
    """A document as it is, and as it is with its table made anew."""
    needs, make, _ = TABLES[name]
    before = page.read_text()
    found = re.search(rf"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)", before, re.DOTALL)
    if found is None:
        raise SystemExit(f"{page.name}: expected the lines <!-- begin: {name} --> and <!-- end: {name} -->")
    if not all((RESULTS / f"{stem}.json").exists() for stem in needs):
        return before, before
    return before, f"{before[: found.end(1)]}{make(page)}\n{before[found.start(2) :]}"


def draw_encoder(path: Path, found: dict[str, Any]) -> None:
    """Step time and peak memory of PyTorch's encoder layers."""
    seconds = {variant: found["seconds"][variant]["median"] for variant in ENCODER_ROWS}
    peaks = {variant: found["peak_bytes"][variant] / 1e9 for variant in ENCODER_ROWS}
    draw_bars(path, seconds, ("peak memory of a step, GB", peaks, "{:.2f} GB"))


def draw_whole(path: Path, found: dict[str, Any]) -> None:
    """Step time and peak memory of whole steps of a Llama."""
    seconds = {variant: found["seconds"][variant]["median"] for variant in WHOLE_ROWS}
    peaks = {variant: found["peak_bytes"][variant]["above_gradients"] / 2**20 for variant in WHOLE_ROWS}
    draw_bars(path, seconds, ("peak above weights and gradients, MiB", peaks, "{:,.0f} MiB"))


def draw_policies(path: Path, found: dict[str, Any]) -> None:
    """Memory against time, a point for each policy; those that leave layers as they were all in another colour."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(9, 5), layout="constrained", facecolor="white")
    rows = sorted(found["rows"], key=lambda name: found["rows"][name]["seconds"]["median"])
    points = [(name, above_weights(found, name), found["rows"][name]["seconds"]["median"]) for name in rows]
    for name, x, y in points:
        axis.plot(x, y, "o", color="#5f7fb8" if name in ("none", "Hugging Face's checkpointing") else "#d1603d")
    axis.set_xlabel("peak above weights, MiB")
    axis.set_ylabel("seconds a step")
    axis.margins(x=0.15, y=0.1)
    axis.spines[["top", "right"]].set_visible(False)
    figure.draw_without_rendering()  # where points lie is known once there is a layout
    label_points(axis, [("no checkpointing" if name == "none" else name, x, y) for name, x, y in points])
    saved(figure, path)


def draw_plan(path: Path) -> None:
    """The plan of docs/budget.md for Llama-3-8B on a card of 80 GB, predicted as its command predicts it."""
    from ckptfused.cli import main as ckptfused

    pyplot()
    words = "plan --config llama-3-8b --batch 2 --seq 8192 --budget 74GiB --device h100 --plot"
    if ckptfused([*words.split(), str(path)]):
        raise SystemExit(f"ckptfused {words} failed")
    path.write_text(short(path.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a table is out of date")
    check = parser.parse_args().check
    stale = []
    for name, page in ((name, page) for name, (_, _, pages) in TABLES.items() for page in pages):
        before, after = filled(name, page)
        if before != after:
            stale.append(f"{page.name}: the table {name!r} is not that of its result")
            if not check:
                page.write_text(after)
    if check and stale:
        sys.exit("\n".join([*stale, "`make pictures` writes it anew"]))
    pictures = (
        (ENCODER, draw_encoder, PICTURE),
        (WHOLE, draw_whole, WHOLE_PICTURE),
        (POLICIES, draw_policies, POLICIES_PICTURE),
    )
    for name, draw, picture in pictures:
        if not check and (RESULTS / f"{name}.json").exists():
            draw(picture, result(name))
    if not check:
        draw_plan(IMAGES / "plan.svg")


if __name__ == "__main__":
    main()

"""Draws the documents' pictures from committed results, and writes their tables and the results' own pages.

A document quotes figures between two lines, `<!-- begin: NAME -->` and `<!-- end: NAME -->`. This command writes what
stands between them from benchmarks/results/ alone. Without the result the lines stay as they are.

    python -m benchmarks draw            # or: make pictures
    python -m benchmarks draw --check    # changes nothing; fails where a table or page is not that of its result
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks import runner
from benchmarks.benchmark import MIB
from benchmarks.committed import case_of, result, seconds
from benchmarks.drawings import ENCODER_ROWS, WHOLE_ROWS, draw_encoder, draw_policies, draw_step, draw_whole
from benchmarks.pages import page as result_page
from benchmarks.pictures import pyplot, short
from benchmarks.planned_steps import best_by_hand
from benchmarks.policies import above
from benchmarks.step_models import CASES
from benchmarks.step_ways import CHECKPOINT, EAGER, OURS
from benchmarks.tables import table

ROOT, RESULTS = runner.ROOT, runner.RESULTS
IMAGES = ROOT / "docs" / "images"
PICTURE, WHOLE_PICTURE = IMAGES / "encoder_step.svg", IMAGES / "whole_step.svg"
POLICIES_PICTURE = IMAGES / "policies.svg"
POLICIES = "policies-12x384"
PLANNED = "planned-steps-12x384"
ENCODER = "encoder-4x512x4096"
STEP = "step-encoder-float32-zen5"
STEP_PICTURE = IMAGES / "step.svg"
WHOLE = "whole-step-8x384x32768"
CASES_MEASURED = {
    name: f"step-{name}-bfloat16-zen5"
    for name in ["encoder", "encoder-4096", "llama", "llama-dropout", "gpt2", "bert", "vit", "lora", "qlora", "experts"]
}
SPEED = {
    "Zen 5 (bf16 instructions), float32": "llama-4x1024-float32-zen5",
    "Zen 5, bfloat16": "llama-4x1024-bfloat16-zen5",
}
"""Label of a row -> result, in the order of the table."""


def encoder_table(page: Path) -> str:
    """Step time and memory of PyTorch's encoder layers in three variants, and the picture of them."""
    found = result(ENCODER)
    sizes, rows, threads = case_of(found)
    best = found["environment"]["cpu"]["instructions"].split()[-1]
    cells = [
        [label, f"{seconds(rows, v):.2f} s", f"{rows[v]['peak'] / 1e9:.2f} GB"] for v, label in ENCODER_ROWS.items()
    ]
    return f"""{table(["one training step", "time", "peak memory"], cells)}

{sizes["layers"]} layers of width {sizes["width"]}, {sizes["tokens"]} tokens, bfloat16, dropout 0.1 (PyTorch's \
default), {threads} cores with {best}; measured as `benchmarks/results/{ENCODER}.md` says.

![Step time and peak memory of the three variants]({PICTURE.relative_to(page.parent).as_posix()})"""


def step_picture(page: Path) -> str:
    """The picture of all ways to train one model."""
    found = result(STEP)
    sizes, _, threads = case_of(found)
    where, shape = found["environment"], CASES[sizes["case"]].shape(sizes["size"])
    layer = f"nn.TransformerEncoderLayer({shape.width}, {shape.heads})"
    how = os.path.relpath(ROOT / "docs" / "how-it-works.md", page.parent)
    return f"""![Peak memory and time of a training step, each way a point]\
({STEP_PICTURE.relative_to(page.parent).as_posix()})

{shape.layers} × `{layer}` with dropout {shape.dropout}, {shape.batch} × {shape.tokens} tokens, {sizes["dtype"]}; \
{where["cpu"]["model"]}, {threads} cores, PyTorch {where["torch"].partition("+")[0]}. Each point is one way to train \
the same model, as `benchmarks/results/{STEP}.md` says. Of the time, a part on AMD's processors is the library that \
multiplies float32 ([oneDNN]({how}#small-kernels-large-products)), which eager PyTorch does not ask."""


def cases_table(page: Path) -> str:
    """Every model of `step`: time and peak of eager PyTorch, and of others beside."""
    head = ["model", "eager", "checkpoint", "`torch.compile`, the fastest", *(f"`{keep}`" for keep in _KEPT), "result"]
    cells = []
    for name, stem in CASES_MEASURED.items():
        _, rows, threads = case_of(result(stem))
        timed = {way: row for way, row in rows.items() if "median" in row}
        fastest = min((way for way in timed if way.startswith("compile")), key=lambda way: timed[way]["median"])
        ours = [f"{OURS} {keep}" for keep in _KEPT]
        chosen = [
            CHECKPOINT,
            fastest,
            *(f"{way}, {_CHUNKED}" if f"{way}, {_CHUNKED}" in timed else way for way in ours),
        ]
        base = timed[EAGER]
        beside = [
            f"{timed[way]['median'] / base['median']:.2f}×, {timed[way]['peak'] / base['peak']:.2f}×" for way in chosen
        ]
        cells.append(
            [name, f"{base['median']:.2f} s, {base['peak'] / MIB:,.0f} MiB", *beside, f"`benchmarks/results/{stem}.md`"]
        )
    where = result(stem)["environment"]
    return f"""{table(head, cells)}

Of eager the time of a step, and its peak above weights and optimizer state; of the others both as a share of that. \
{where["cpu"]["model"]} ({where["cpu"]["instructions"].split()[-1]}), {threads} cores, bfloat16; of models with a \
vocabulary, ours make the loss in chunks."""


_KEPT, _CHUNKED = ("inputs", "attention"), "chunked loss"


def whole_table(page: Path) -> str:
    """Whole training steps of a Llama, and the picture of them."""
    sizes, rows, threads = case_of(result(WHOLE))
    cells = [
        [label, f"{seconds(rows, v):.2f} s", f"{rows[v]['above_gradients'] / MIB:,.0f} MiB"]
        for v, label in WHOLE_ROWS.items()
    ]
    return f"""{table(["one whole step of a Llama", "time", "peak above weights and gradients"], cells)}

{sizes["layers"]} layers of width {sizes["width"]}, vocabulary {sizes["vocabulary"]:,}, {sizes["batch"]} × \
{sizes["tokens"]} tokens, float32, AdamW, {threads} cores: `benchmarks/results/{WHOLE}.md`.

![Step time and peak memory of the variants]({WHOLE_PICTURE.relative_to(page.parent).as_posix()})"""


def speed_table(page: Path) -> str:
    """What a step of `ckptfused inputs` takes of the others' time, on the processors measured."""
    cells = []
    for label, name in SPEED.items():
        _, rows, _ = case_of(result(name))
        over = [seconds(rows, "ckptfused inputs") / seconds(rows, v) for v in ("plain", "torch.utils.checkpoint")]
        cells.append([label, *(f"{ratio:.2f}×" for ratio in over), f"`benchmarks/results/{name}.md`"])
    return table(["processor, type", "plain", "under `torch.utils.checkpoint`", "result"], cells)


SCRATCH = {dtype: f"ffn-scratch-8192x1024-{dtype}" for dtype in ("float32", "bfloat16")}


def scratch_table(page: Path) -> str:
    """Peak and time of a backward under limits of the FFN's scratch."""
    found = [case_of(result(name)) for name in SCRATCH.values()]
    sizes, first, threads = found[0]
    cells = []
    for limit in first:
        row = [limit]
        for _, rows, _ in found:
            over = seconds(rows, limit) / seconds(rows, next(iter(rows)))
            row += [f"{rows[limit]['peak'] / MIB:,.0f} MiB", f"{over:.2f}×"]
        cells.append(row)
    return f"""{table(["scratch", "peak, float32", "time", "peak, bfloat16", "time"], cells)}

Backward of one block, C {sizes["width"]}, F {sizes["hidden"]}, {sizes["tokens"]:,} tokens, {threads} cores; the first \
row is in one piece. Measured as {" and ".join(f"`benchmarks/results/{name}.md`" for name in SCRATCH.values())} say."""


HEADS = {
    f"{vocabulary:,} classes, {dtype}": f"loss-head-2048x1024-{vocabulary}-{dtype}"
    for vocabulary in (32768, 128256)
    for dtype in ("float32", "bfloat16")
}


def heads_table(page: Path) -> str:
    """Forward and backward of the loss head alone beside PyTorch's logits as a whole."""
    plain, ours = "linear, cross_entropy", ("ckptfused", 'ckptfused, keep="inputs"')
    cells = []
    for label, name in HEADS.items():
        _, rows, _ = case_of(result(name))
        peaks = {v: f"{rows[v]['peak'] / MIB:,.0f} MiB" for v in (plain, *ours)}
        beside = [f"{seconds(rows, v) / seconds(rows, plain):.2f}×, {peaks[v]}" for v in ours]
        cells.append([label, f"{seconds(rows, plain):.2f} s", peaks[plain], *beside, f"`benchmarks/results/{name}.md`"])
    head = ["loss head", "PyTorch's", "its peak", '`keep="gradients"`', '`keep="inputs"`', "result"]
    return f"""{table(head, cells)}

Forward and backward of 2,048 tokens of width 1024, gradients included; 2 cores."""


def policies_table(page: Path) -> str:
    """Memory and step time of one model under the policies that guides compare, and the picture of them."""
    sizes, rows, threads = case_of(result(POLICIES))
    cells = [[name, f"{above(row):,.1f} MiB", f"{row['median']:.3f} s"] for name, row in rows.items()]
    return f"""{table(["policy", "peak above weights", "time"], cells)}

Llama of {sizes["layers"]} layers of width {sizes["width"]}, {sizes["batch"]} × {sizes["tokens"]} tokens, float32, \
forward and backward, chunked loss, {threads} cores; what is on the CPU stays there, so offload changes nothing here. \
Measured as `benchmarks/results/{POLICIES}.md` says.

![Peak memory and step time of the policies]({POLICIES_PICTURE.relative_to(page.parent).as_posix()})"""


def planned_table(page: Path) -> str:
    """What planned steps need and take, measured, beside the best policy made by hand that fits."""
    sizes, rows, threads = case_of(result(PLANNED))
    cells = []
    for row in (row for row in rows.values() if "budget" in row):
        best = best_by_hand(row["budget"], rows)
        hand = ["none fits", "–"] if best is None else [best, f"{seconds(rows, best):.3f} s"]
        peak = f"{row['peak'] / MIB:,.1f} MiB ({row['peak'] / row['budget']:.1%})"
        cells.append([f"{row['budget'] / MIB:,.1f} MiB", peak, f"{row['median']:.3f} s", *hand])
    return f"""{table(["budget", "measured peak", "plan", "best by hand that fits", "its time"], cells)}

Llama of {sizes["layers"]} layers of width {sizes["width"]}, {sizes["batch"]} × {sizes["tokens"]} tokens, float32, \
{threads} cores, as `benchmarks/results/{PLANNED}.md` says."""


# By name: the result files that a table is made from, what makes it, and the pages that have it.
TABLES: dict[str, tuple[tuple[str, ...], Callable[[Path], str], tuple[Path, ...]]] = {
    "step": ((STEP,), step_picture, (ROOT / "README.md", ROOT / "docs" / "index.md")),
    "encoder-step": ((ENCODER,), encoder_table, (ROOT / "docs" / "keep.md",)),
    "whole-step": ((WHOLE,), whole_table, (ROOT / "README.md", ROOT / "docs" / "loss.md")),
    "ffn-scratch": (tuple(SCRATCH.values()), scratch_table, (ROOT / "docs" / "keep.md",)),
    "loss-head": (tuple(HEADS.values()), heads_table, (ROOT / "docs" / "loss.md",)),
    "policies": ((POLICIES,), policies_table, (ROOT / "docs" / "policies.md",)),
    "planned-steps": ((PLANNED,), planned_table, (ROOT / "docs" / "budget.md",)),
    "cases": (tuple(CASES_MEASURED.values()), cases_table, (ROOT / "docs" / "keep.md",)),
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


PREDICTED = {
    "plan.svg": "plan --config llama-3-8b --batch 2 --seq 8192 --budget 74GiB --device h100",
    "context.svg": "context --config llama-3-8b --lora 16 --memory 80GiB",
}
"""Pictures of docs/budget.md and docs/long-sequences.md, drawn by commands of the package."""


def draw_predicted(path: Path) -> None:
    """One of PREDICTED."""
    from ckptfused.cli import main as ckptfused

    pyplot()
    words = PREDICTED[path.name]
    if ckptfused([*words.split(), "--plot", str(path)]):
        raise SystemExit(f"ckptfused {words} failed")
    path.write_text(short(path.read_text()))


def stale() -> Iterator[tuple[str, Path, str]]:
    """Tables and results' pages that are not those of their results: what is said, the page, its right text."""
    for name, page in ((name, page) for name, (_, _, pages) in TABLES.items() for page in pages):
        before, after = filled(name, page)
        if before != after:
            yield f"{page.name}: the table {name!r} is not that of its result", page, after
    for path in sorted(RESULTS.glob("*.json")):
        found, page = json.loads(path.read_text()), path.with_suffix(".md")
        if "benchmark" in found:  # not a GPU's
            text = result_page(runner.module(found["benchmark"]).BENCHMARK, found)
            if not page.exists() or page.read_text() != text:
                yield f"{page.name}: it is not the page of its result", page, text


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks draw", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where something is out of date")
    if parser.parse_args(words).check:
        if lines := [said for said, _, _ in stale()]:
            print("\n".join([*lines, "`make pictures` writes it anew"]), file=sys.stderr)
        return int(bool(lines))
    for _, page, text in stale():
        page.write_text(text)
    pictures = (
        (STEP, draw_step, STEP_PICTURE),
        (ENCODER, draw_encoder, PICTURE),
        (WHOLE, draw_whole, WHOLE_PICTURE),
        (POLICIES, draw_policies, POLICIES_PICTURE),
    )
    for name, draw, picture in pictures:
        if (RESULTS / f"{name}.json").exists():
            draw(picture, result(name))
    for name in PREDICTED:
        draw_predicted(IMAGES / name)
    return 0

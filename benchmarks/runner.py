"""The one runner of all benchmarks: it checks, lets variants take turns, and writes a result and its page.

    python -m benchmarks --list
    python -m benchmarks whole-step --budget 70 --label zen5

An option of a benchmark takes several values: each combination is a case. Writes
benchmarks/results/<name and sizes>[-<label>].json and .md, after every case.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import Field, asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import environment
from benchmarks.benchmark import Benchmark, Clock, Rows, S, Steps
from benchmarks.names import NAMES, OTHERS
from benchmarks.pages import page, sizes_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def take_turns(steps: Steps, budget: float, clock: Clock, least: int = 3) -> dict[str, list[float]]:
    """Times of each step: one untimed round, then rounds of all until the budget in seconds is spent, or more."""
    for step in steps.values():
        step()
    taken: dict[str, list[float]] = {name: [] for name in steps}
    names, start, rounds = list(steps), time.perf_counter(), 0
    while names and (rounds < least or time.perf_counter() - start < budget):
        for name in names:
            before = clock.now()
            steps[name]()
            taken[name].append(clock.now() - before)
        names.append(names.pop(0))  # no variant always follows the same other one
        rounds += 1
    return {name: times[int(len(times) * clock.skipped) :] for name, times in taken.items()}


def summary(times: Sequence[float], first: Sequence[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile, the least, and that over the least of the first variant."""
    fifths = statistics.quantiles(times, n=5, method="inclusive")
    return {
        "median": statistics.median(times),
        "p20": fifths[0],
        "p80": fifths[3],
        "least": min(times),
        "least_ratio": min(times) / min(first),
        "steps": len(times),
    }


def alone(benchmark: Benchmark[S], sizes: S, variant: str, threads: int) -> dict[str, Any]:
    """What a variant's own process measures."""
    values = asdict(sizes).items()
    words = [word for name, value in values for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "benchmarks", benchmark.name, *words, "--threads", str(threads)]
    run = subprocess.run([*command, "--alone", variant], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def each_alone(benchmark: Benchmark[S], sizes: S, rows: Rows, names: Sequence[str], threads: int) -> bool:
    """Measures each variant in its own process; False where ctrl-C has ended that, as where a machine's minutes are
    counted: of those that were not measured there is no row then."""
    for number, name in enumerate(names):
        try:
            rows[name] |= alone(benchmark, sizes, name, threads)
        except KeyboardInterrupt:
            if number == 0:
                raise
            for missing in names[number:]:
                del rows[missing]
            return False
    return True


def measure(benchmark: Benchmark[S], sizes: S, options: argparse.Namespace) -> dict[str, Any]:
    """One case: checked, then measured, then timed."""
    steps = benchmark.variants(sizes)
    if options.variant:
        if unknown := set(options.variant) - steps.keys():
            raise SystemExit(f"--variant: expected some of {', '.join(steps)}, got {', '.join(unknown)}")
        steps = {name: steps[name] for name in options.variant}  # in the order asked for
    checked = benchmark.check(sizes, steps)
    rows: Rows = {name: {} for name in steps}
    case = {"case": benchmark.case(sizes), "sizes": asdict(sizes), "checked": checked, "rows": rows}
    for name, figures in benchmark.figures(sizes, steps).items():
        rows.setdefault(name, {}).update(figures)
    if benchmark.alone:
        if not each_alone(benchmark, sizes, rows, list(steps), options.threads):
            return case | {"ended": True}
        steps = {name: step for name, step in steps.items() if "refused" not in rows[name]}
    timed = {name: step for name, step in steps.items() if step is not None}
    taken = take_turns(timed, options.budget, benchmark.clock)
    for name, times in taken.items():
        rows[name] = summary(times, next(iter(taken.values()))) | rows[name]
    return case


def text_of(result: dict[str, Any]) -> str:
    """A result as JSON, with a line for each variant."""
    text = json.dumps(result, indent=1, ensure_ascii=False)
    return re.sub(r"[\[{][^\[\]{}]*[\]}]", lambda found: re.sub(r"\n\s*", " ", found[0]), text) + "\n"


def write(benchmark: Benchmark[Any], result: dict[str, Any], out: Path, stem: str) -> None:
    """The two files of a result."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{stem}.json").write_text(text_of(result))
    (out / f"{stem}.md").write_text(page(benchmark, result))


def default_values(benchmark: Benchmark[Any], field: Field[Any]) -> tuple[Any, ...]:
    """The values that an option has where none are asked for."""
    values = field.metadata.get("values", ()) if field.metadata.get("every") else ()
    return values or (getattr(benchmark.sizes, field.name),)


def parser(benchmark: Benchmark[Any]) -> argparse.ArgumentParser:
    """The options of a benchmark: its sizes, and those that all have."""
    found = argparse.ArgumentParser(
        prog=f"python -m benchmarks {benchmark.name}",
        description=benchmark.doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for field in fields(benchmark.sizes):
        words, values = default_values(benchmark, field), field.metadata.get("values", ())
        found.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=type(words[0]),
            nargs="+",
            action="extend",
            choices=values if len(values) > 1 and isinstance(values[0], str) else None,
            help=f"default: {' '.join(map(str, words))}",
        )
    found.add_argument("--variant", action="append", help="measure this one and others so named; default: all")
    found.add_argument("--budget", type=float, default=benchmark.budget, help="seconds of timed steps, of each case")
    found.add_argument("--threads", type=int, default=benchmark.threads or torch.get_num_threads())
    found.add_argument("--label", default="", help="ends the name of the result files: the processor, say")
    found.add_argument("--out", type=Path, default=RESULTS)
    found.add_argument("--alone", help=argparse.SUPPRESS)
    return found


def cases_of(benchmark: Benchmark[S], options: argparse.Namespace) -> Iterator[S]:
    """Every combination of the values that were asked for."""
    asked = {f.name: getattr(options, f.name) or default_values(benchmark, f) for f in fields(benchmark.sizes)}
    for values in itertools.product(*asked.values()):
        yield replace(benchmark.sizes, **dict(zip(asked, values, strict=True)))


def run(benchmark: Benchmark[Any], words: Sequence[str]) -> int:
    """One benchmark from the command line."""
    options = parser(benchmark).parse_args(words)
    torch.set_num_threads(options.threads)
    cases = list(cases_of(benchmark, options))
    for sizes in cases:
        torch.manual_seed(sizes.seed)
        if benchmark.alone and options.alone:
            print(json.dumps(benchmark.alone(sizes, options.alone)))
            return 0
    where = environment.describe(shlex.join(["python", "-m", "benchmarks", benchmark.name, *words]))
    results: dict[str, dict[str, Any]] = {}
    for sizes in cases:
        stem = "-".join(filter(None, (benchmark.file(sizes), options.label)))
        print(stem, benchmark.case(sizes), file=sys.stderr, flush=True)
        torch.manual_seed(sizes.seed)
        result = results.setdefault(
            stem, {"benchmark": benchmark.name, "unit": benchmark.clock.unit, "cases": [], "environment": where}
        )
        result["cases"].append(measure(benchmark, sizes, options))
        write(benchmark, result, options.out, stem)  # after each: what was measured stays
        if "ended" in result["cases"][-1]:
            return 130  # as a shell has it of ctrl-C
    print("\n".join(page(benchmark, result) for result in results.values()), flush=True)
    found = [case for result in results.values() for case in result["cases"]]
    reached = [goal.reached(case["rows"]) for case in found for goal in benchmark.goals(sizes_of(benchmark, case))]
    return int(benchmark.must_meet and any(one is not None and not one[0] for one in reached))


def module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name.replace('-', '_')}")


def listing() -> str:
    """Every command with what it measures and what is to be reached."""
    lines = []
    for name in NAMES:
        benchmark: Benchmark[Any] = module(name).BENCHMARK
        lines += [f"{name:17} {benchmark.about}"]
        lines += [f"{'':17} goal: {goal}" for goal in benchmark.goals(benchmark.sizes)]
    return "\n".join([*lines, *(f"{name:17} {module(name).__doc__.splitlines()[0]}" for name in OTHERS)])


def main(words: Sequence[str]) -> int:
    """A benchmark by its name, or the list of them."""
    if not words or words[0] in ("--list", "-l", "--help", "-h"):
        print(listing())
        return 0
    name, *rest = words
    if name in NAMES:
        return run(module(name).BENCHMARK, rest)
    return int(module(name).main(rest) or 0)

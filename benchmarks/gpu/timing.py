"""How the GPU benchmarks measure: variants take turns, each between two events, out of a cache that holds none of it.

On a CPU the same code runs with its clock, so that tests can go through it; such times mean nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RESULTS = Path(__file__).resolve().parents[1] / "results"
ROUNDS = 40
AHEAD = 1_000_000  # GPU cycles of waiting, while the host enqueues what is timed: half a millisecond


@dataclass(frozen=True)
class Times:
    """Milliseconds of one variant."""

    median: float
    p20: float
    p80: float
    rounds: int

    @classmethod
    def of(cls, values: list[float]) -> Times:
        if len(values) < 2:
            return cls(values[0], values[0], values[0], len(values))
        fifths = statistics.quantiles(values, n=5, method="inclusive")
        return cls(statistics.median(values), fifths[0], fifths[3], len(values))


class Clock:
    """Times calls on one device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._cache: Tensor | None = None
        if device == "cuda":
            size = torch.cuda.get_device_properties(0).L2_cache_size
            self._cache = torch.zeros(max(size, 32 << 20), dtype=torch.float32, device=device)  # four times its bytes

    def _start(self, call: Callable[[], object]) -> Callable[[], float]:
        """Enqueues one call; the result waits for it and gives its milliseconds."""
        if self._cache is None:
            before = time.perf_counter()
            call()
            taken = 1e3 * (time.perf_counter() - before)
            return lambda: taken
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._cache.sum()  # read, not written: what is left in the cache needs no writing back
        torch.cuda._sleep(AHEAD)
        begin.record()
        call()
        end.record()

        def wait() -> float:
            end.synchronize()
            return begin.elapsed_time(end)

        return wait

    def compare(
        self,
        calls: Mapping[str, Callable[[], object]],
        seconds: float,
        rounds: int = ROUNDS,
        after: Callable[[dict[str, Times]], object] | None = None,
    ) -> dict[str, Times]:
        """Two untimed rounds, then rounds of all calls, in rotating order, until there are `rounds` or the time is up
        (three at least).

        after: called after every round with the times so far, so that what was measured stays when a process is ended.
        """
        for _ in range(2):
            for call in calls.values():
                self._start(call)()
        names, start = list(calls), time.perf_counter()
        taken: dict[str, list[float]] = {name: [] for name in names}
        while len(taken[names[0]]) < 3 or (
            len(taken[names[0]]) < rounds and time.perf_counter() - start < seconds
        ):  # fmt: skip
            for name in names:
                taken[name].append(self._start(calls[name])())
            names.append(names.pop(0))
            if after is not None:
                after({name: Times.of(taken[name]) for name in calls})
        return {name: Times.of(values) for name, values in taken.items()}


@dataclass(frozen=True)
class Goal:
    """A ratio to be reached, and what was."""

    name: str
    value: float
    limit: float
    at_least: bool
    ideal: float | None = None

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def row(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": round(self.value, 4),
            "goal": f"{'≥' if self.at_least else '≤'} {self.limit:g}",
            "met": self.met,
            "ideal": self.ideal,
        }


def parser(doc: str | None) -> ArgumentParser:
    """--out FOLDER, --stem NAME, --seconds S, --device cuda, --tiny."""
    found = ArgumentParser(description=doc.splitlines()[0] if doc else None)
    found.add_argument("--out", type=Path, default=RESULTS)
    found.add_argument("--stem", default="gpu", help="what the result file's name begins with")
    found.add_argument("--seconds", type=float, default=30.0, help="of timed calls, about")
    found.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    found.add_argument("--tiny", action="store_true", help="sizes for a test of this script")
    return found


def arguments(doc: str | None) -> Namespace:
    return parser(doc).parse_args()


@lru_cache(maxsize=8)
def where(device: str, case: str) -> dict[str, Any]:
    """The GPU, as far as it decides times, and everything that a CPU result file says.

    COMMIT names the commit where the checkout came without its history.
    """
    from benchmarks import environment

    described = environment.describe(f"make gpu PARTS={case}")
    described["commit"] = os.environ.get("COMMIT") or described["commit"]
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        described["gpu"] = {
            "name": gpu.name,
            "capability": f"{gpu.major}.{gpu.minor}",
            "multiprocessors": gpu.multi_processor_count,
            "memory": gpu.total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return described


def path_of(options: Namespace, case: str) -> Path:
    return options.out / f"{options.stem}_{case}.json"


def write(options: Namespace, case: str, result: dict[str, Any]) -> Path:
    """<out>/<stem>_<case>.json, whole or not at all: a part may be ended at any moment."""
    options.out.mkdir(parents=True, exist_ok=True)
    path = path_of(options, case)
    text = json.dumps({"case": case, **result, "environment": where(options.device, case)}, indent=2) + "\n"
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)
    return path

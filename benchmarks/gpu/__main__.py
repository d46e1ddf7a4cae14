"""Builds for the GPU at hand, tests and measures there: what `make gpu` runs.

    python -m benchmarks.gpu [--out FOLDER] [--budget SECONDS] [PART ...]

Uses the Python it is run with, its torch and its triton; installs and downloads nothing. An extension that
`make gpu-extension` made elsewhere is used where it fits. Every part is a process of its own with a limit of time; one
that fails or runs out of time does not stop the rest. Results go to <out>/<date>_<gpu>_<case>.json and
<out>/<date>_<gpu>.md, all output to gpu.log; a summary comes last. Where there is no GPU, or no torch, every part is
reported as not run.

Some parts run only where they are named. "tune" measures the FFN of the block's benchmark by cuBLAS and by Triton and
leaves <out>/ffn_tuned.json, which CKPTFUSED_CACHE=<out> has blocks choose by, also those of a later run. "grid" and
"models" are described in their files.
"""

from __future__ import annotations

import argparse
import datetime
import math
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import extension
from benchmarks.gpu.parts import MEASURED, PARTS, ROOT, Outcome, Part, run_part
from benchmarks.gpu.summary import results, summary

BUDGET = 520.0  # seconds of all parts: nine minutes, less what starting and the summary take
UNHURRIED = 3600.0  # of one part in a rehearsal
NO_GPU = "no CUDA device"


def gpu() -> tuple[str, str] | str:
    """Name and compute capability of the first GPU, or why there is none to use."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: of a library that torch loads
        missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        what = "no torch in" if missing else "torch cannot be imported by"
        return f"{what} {sys.executable}; another Python: make gpu PYTHON=..."

    if not torch.cuda.is_available():
        return NO_GPU
    major, minor = torch.cuda.get_device_capability()
    return torch.cuda.get_device_name(), f"{major}.{minor}"


def built_for(capability: str) -> str:
    """Why the extension at hand cannot be used on this GPU; empty if it can. In a process of its own: one that has
    imported an extension keeps it."""
    code = "import ckptfused; print(*ckptfused.build_info()['cuda_architectures'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or ["the extension cannot be imported"])[-1]
    wanted, names = f"sm_{capability.replace('.', '')}", done.stdout.split()
    fits = any(name.rstrip("a") == wanted or name.startswith("compute_") for name in names)
    return "" if fits else f"the extension is built for {' '.join(names) or 'the CPU alone'}, not for {wanted}"


def prebuilt(capability: str) -> Outcome | None:
    """Puts the extension that was made elsewhere in its place; None, and says why, where it has to be built here."""
    start = time.monotonic()
    reason = extension.place() or built_for(capability)
    if not reason:
        return Outcome("ok", time.monotonic() - start, "made elsewhere")
    print(f"the prebuilt extension is not used: {reason}", flush=True)
    return None


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__.splitlines()[0] if __doc__ else None)
    names = [part.name for part in PARTS]
    asked = ", ".join(part.name for part in PARTS if not part.unasked)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(names)}; if none, all but {asked}")
    parser.add_argument("--out", type=Path, default=None, help="default: benchmarks/results")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds of all parts together")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU in tiny sizes: does every command work?")
    found = parser.parse_args()
    if unknown := set(found.parts) - set(names):
        parser.error(f"parts: expected some of {', '.join(names)}, got {' '.join(sorted(unknown))}")
    return found


def run_parts(
    chosen: Sequence[Part], capability: str, stem: str, out: Path, log_path: Path, budget: float, rehearsal: bool
) -> dict[str, Outcome]:
    """Runs them one after another, each as long as it may while those behind it keep their least."""
    outcomes: dict[str, Outcome] = {}
    end = time.monotonic() + budget
    unusable: str | None = "" if rehearsal else None  # None: not known yet
    log_path.unlink(missing_ok=True)
    with open(log_path, "a") as log:  # to append: the parts write to it, too
        for index, part in enumerate(chosen):
            if part.name == "build":
                ready = Outcome("not run", detail="a rehearsal builds nothing") if rehearsal else prebuilt(capability)
                if ready is not None:
                    outcomes[part.name] = ready
                    continue
            left = end - time.monotonic() - sum(later.least for later in chosen[index + 1 :])
            if left < 5:
                outcomes[part.name] = Outcome("not run", detail="no time left")
                continue
            if part.name != "build":
                unusable = built_for(capability) if unusable is None else unusable
                if unusable:
                    outcomes[part.name] = Outcome("not run", detail=unusable)
                    continue
            if part.name in MEASURED:  # never the numbers of an earlier run
                (out / f"{stem}_{part.name}.json").unlink(missing_ok=True)
            seconds = UNHURRIED if rehearsal else min(part.most, left)
            print(f"== {part.name}, at most {seconds:.0f} s", flush=True)
            taken = run_part(part, seconds, capability, stem, out, log, rehearsal)
            outcomes[part.name] = taken
            print(f"== {part.name}: {taken.status}, {taken.seconds:.0f} s", flush=True)
    return outcomes


def _is_chosen(part: Part, asked: argparse.Namespace) -> bool:
    if asked.parts:
        return part.name in asked.parts
    # What tune compares, only a GPU runs.
    return part.name in MEASURED and part.name != "tune" if asked.rehearse else part.unasked


def main() -> int:
    asked = options()
    chosen = [part for part in PARTS if _is_chosen(part, asked)]
    found = ("rehearsal", "0.0") if asked.rehearse else gpu()
    if isinstance(found, str):
        print(summary("none", {part.name: Outcome("not run", detail=found) for part in chosen}, {}))
        return 0
    name, capability = found
    stem = f"{datetime.date.today():%Y-%m-%d}_{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}"
    out: Path = (asked.out or ROOT / ("build/rehearsal" if asked.rehearse else "benchmarks/results")).resolve()
    log_path = (out if asked.out else ROOT / "build") / "gpu.log"
    for folder in (out, log_path.parent):
        folder.mkdir(parents=True, exist_ok=True)
    budget = math.inf if asked.rehearse else asked.budget
    outcomes = run_parts(chosen, capability, stem, out, log_path, budget, asked.rehearse)
    page = summary(f"{name}, compute capability {capability}", outcomes, results(stem, out, [p.name for p in chosen]))
    (out / f"{stem}.md").write_text(page)
    print(f"\n{page}")
    return 0 if all(outcome.status in ("ok", "not run") for outcome in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

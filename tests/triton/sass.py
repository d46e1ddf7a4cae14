"""Counts what a compiled attention kernel executes in its main loop, read from nvdisasm's listing of its cubin.

Run as a program it prints a table; words choose its lines: ``python -m tests.triton.sass sm_90 D128``.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import triton

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
_LABEL = re.compile(r"^(\.L\w+):$")
_TARGET = re.compile(r"`\((\.L\w+)\)")
MATRIX = ("HGMMA", "HMMA", "UTCHMMA")
COLUMNS = ("BAR", "STS", "LDS", "SHFL", *MATRIX)


@dataclass(frozen=True)
class Loop:
    """The instructions of one round, by opcode."""

    opcodes: Counter[str]

    def count(self, *names: str) -> int:
        """Instructions whose opcode up to a dot is one of these; all of them if none is named."""
        return sum(n for opcode, n in self.opcodes.items() if not names or opcode.split(".")[0] in names)

    @property
    def matrix(self) -> int:
        return self.count(*MATRIX)


def disassemble(cubin: bytes) -> str:
    """nvdisasm's listing, with labels; Triton brings the program with it."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.cubin"
        source.write_bytes(cubin)
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(source)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def loops(listing: str) -> list[Loop]:
    """The innermost loops: from the target of a branch backwards to that branch."""
    opcodes: list[str] = []
    labels: dict[str, int] = {}
    found: list[tuple[int, int]] = []
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(opcodes)
        elif instruction := _INSTRUCTION.match(line):
            opcodes.append(instruction[2])
            target = _TARGET.search(instruction[3])
            if target and instruction[2].startswith("BRA") and target[1] in labels:
                found.append((labels[target[1]], len(opcodes)))
    inner = [a for a in found if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in found)]
    return [Loop(Counter(opcodes[first:last])) for first, last in inner]


def main_loop(cubin: bytes) -> Loop:
    """The loop over whole tiles, in which nothing is hidden by its position: the shortest that multiplies matrices."""
    return min((loop for loop in loops(disassemble(cubin)) if loop.matrix), key=Loop.count)


def main() -> None:
    from tests.triton.compiling import Kernel, compile_kernel

    print(f"{'kernel':30}{'tile':>12}{'loop':>7}{'/element':>9}" + "".join(f"{name:>8}" for name in COLUMNS))
    classes = ("sm_90", "sm_80", "sm_100", "sm_120")
    for device, d, stage, dropout in product(classes, (64, 128), ("fwd", "dq", "dkdv"), (False, True)):
        k = Kernel(device, stage, d, dropout=dropout)
        if not all(word in k.id for word in sys.argv[1:]):
            continue
        c, r = k.config, compile_kernel(k)
        loop = main_loop(r.cubin)
        each = loop.count() * 32 * c.warps / (c.block_m * c.block_n)
        tile = f"{c.block_m}x{c.block_n}/{c.stages}w{c.warps}"
        counts = "".join(f"{loop.count(name):8}" for name in COLUMNS)
        print(f"{k.id:30}{tile:>12}{loop.count():7}{each:9.1f}{counts}  {r.registers} registers", flush=True)


if __name__ == "__main__":
    main()

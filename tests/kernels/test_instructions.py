"""Instructions that kernels which move memory execute: none more than its budget, and few enough to be bound by memory.

Such a kernel cannot be faster than the schedulers of its multiprocessor issue its instructions. With b bytes moved a
thread and n instructions in between, at one instruction a cycle and scheduler, the ceiling is 4 × 32 × b / n bytes a
cycle, times the share of a scheduler's cycles that the resident warps can fill. Kernels reach 0.6 to 0.75 of it, so it
has to be at least 1.4 times the rate at which the GPU copies.

`instructions.json` has each kernel's budget without dropout and, where it can drop, with it: 5 % above what nvcc 13.0
makes for sm_90. Template arguments are the types, then kSteps of rows, the activation (3 is silu) and whether it is
gated, or the norm of heads (0 none, 1 without mean and bias, 2 any); then the flags as the kernel declares them. The
table of all is printed when pytest ends:
`pytest tests/kernels/test_instructions.py`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import SUMMARY
from tests.kernels import sass
from tests.kernels.cubins import KERNELS, NVCC, compile_kernels, compile_once, demangled, gencode_of
from tests.tools import nvdisasm

NVDISASM = nvdisasm()
pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(NVCC is None or NVDISASM is None, reason="needs nvcc and nvdisasm"),
]

ARCHITECTURE = "sm_90"
BUDGETS: dict[str, list[int]] = json.loads((Path(__file__).parent / "instructions.json").read_text())
# Those of rows and elements. What reads a row anew in each pass is for any width and alignment, doubles are for
# gradcheck, heads in another order than 16 bytes at a time are those of odd widths, and activations whose columns begin
# within a call of the generator are no block's.
FILES = re.compile(r"(norm|residual|activation|cross_entropy|qk)_(fwd|bwd)")
SLOW = re.compile(r"double|^(?!qk).*, 0, |^(qk|activation).*false>")
# With a team of 256 threads, as a row of 4096 columns has. All kernels' blocks of elements have as many.
THREADS = 256

CLOCK = 1.98  # GHz, of an H100's and an H200's multiprocessors
H200_COPY = 32.6  # KB/µs and multiprocessor, measured
MARGIN = 1.4
# Bound by memory even on an H200. Exact gelu, the ungated activations and soft-capped logits (a loss's kernels that are
# not "true") take more arithmetic for a byte.
AT_COPY_RATE = re.compile(
    r"qk_fwd|qk_bwd|norm_fwd|norm_grad|residual_fwd|drop_grad|add_grad"
    r"|activation_\w+<\w+, 3, true, true>|cross_entropy_\w+<\w+, true>"
)
PHILOX = "0x2daee0ad"  # of a constant of the generator, negated: a block with it draws


@dataclass(frozen=True)
class Count:
    """What a kernel executes in one turn of its loop, without dropout and at most."""

    kernel: str
    registers: int
    plain: sass.HotPath
    dropped: sass.HotPath
    revisited: int = 0  # reads of 16 bytes that another pass over the row has brought into the cache

    @property
    def instructions(self) -> list[int]:
        both = [self.plain.count(), self.dropped.count()]
        return both[: len(set(both))]

    @property
    def threads(self) -> int:
        """Resident on a multiprocessor: registers are given to warps in steps of 256."""
        warps = 65536 // (-(-self.registers * 32 // 256) * 256)
        return min(warps * 32 // THREADS, 2048 // THREADS) * THREADS

    def accesses(self, path: sass.HotPath) -> int:
        """Accesses of 16 bytes of memory."""
        return path.loads + path.stores - self.revisited

    def ceiling(self, path: sass.HotPath) -> float:
        """KB/µs and multiprocessor. Arithmetic takes four cycles, so four warps keep a scheduler busy."""
        share = min(1.0, self.threads / 32 / 4 / 4)
        return 4 * 32 * 16 * self.accesses(path) / path.cycles * CLOCK * share


def counts(registers: dict[str, int], cubins: list[Path]) -> Iterator[Count]:
    """Counts of kernels in cubins of the architecture; registers by mangled name."""
    assert NVDISASM is not None
    for cubin in cubins:
        architecture, kernels = sass.disassemble(NVDISASM, cubin)
        if architecture != ARCHITECTURE:
            continue
        for (mangled, blocks), name in zip(kernels.items(), demangled(list(kernels)), strict=True):
            if SLOW.search(name):
                continue
            if name.startswith("cross_entropy"):
                yield _passes(name, registers[mangled], blocks)
                continue
            if name.startswith("qk"):
                yield _heads(name, registers[mangled], blocks)
                continue
            dropped = sass.hot_path(blocks)
            assert dropped is not None, f"{name}: no way round its loop reads and writes 16 bytes at a time"
            assert dropped.loads and dropped.stores, f"{name}: no LDG.128 or no STG.128"
            yield Count(name, registers[mangled], sass.hot_path(blocks, without=PHILOX) or dropped, dropped)


def _passes(name: str, registers: int, blocks: list[sass.Block]) -> Count:
    """All passes over a row that take exponentials: not those that a rare option adds, zero it or look for NaN. Of each
    as many turns as read what one of the longest reads."""
    passes = [path for path in sass.hot_paths(blocks) if path.opcodes["MUFU.EX2"]]
    most = max(path.loads for path in passes)
    turns = (Counter({name: n * most // path.loads for name, n in path.opcodes.items()}) for path in passes)
    whole = sass.HotPath(sum(turns, Counter()))
    assert whole.loads and whole.stores, f"{name}: no LDG.128 or no STG.128"
    return Count(name, registers, whole, whole, revisited=whole.loads - whole.stores)


def _heads(name: str, registers: int, blocks: list[sass.Block]) -> Count:
    """The longest of the loops: that of a norm, where a gradient's kernel copies v's heads, too. The four reads of
    cos and sin are those of all heads of a token."""
    path = max(sass.hot_paths(blocks), key=sass.HotPath.count)
    assert path.loads and path.stores, f"{name}: no LDG.128 or no STG.128"
    return Count(name, registers, path, path, revisited=4)


def table(found: list[Count]) -> str:
    lines = [
        "A multiprocessor's ceiling by instructions, KB/µs, and its share of 1.4 × an H200's copy rate; with dropout",
        "   instr  bytes ceiling share    instr ceiling share  kernel",
    ]
    for count in found:
        numbers = f"   {count.plain.count():5} {16 * count.accesses(count.plain):6} "
        for n, path in enumerate((count.plain, count.dropped)[: len(count.instructions)]):
            ceiling = count.ceiling(path)
            executed = f"   {path.count():5} " if n else ""
            numbers += f"{executed}{ceiling:7.1f} {ceiling / (MARGIN * H200_COPY):5.0%} "
        lines.append(f"{numbers:55}  {count.kernel}")
    return "\n".join(lines)


@pytest.mark.extended
@pytest.mark.parametrize("source", [path for path in KERNELS if FILES.match(path.stem)], ids=lambda path: path.stem)
def test_budget(
    source: Path, tmp_path_factory: pytest.TempPathFactory, record_property: Callable[[str, object], None]
) -> None:
    compiled = compile_once(source, tmp_path_factory, gencode_of("9.0+PTX"))
    registers = {usage.kernel: usage.registers for usage in compiled.usages if usage.architecture == ARCHITECTURE}
    found = list(counts(registers, compiled.cubins))
    record_property(SUMMARY, table(found))
    assert found
    for count in found:
        budget = BUDGETS.get(count.kernel)
        assert budget is not None, f"{count.kernel} has no budget; it executes {count.instructions} instructions"
        assert len(budget) == len(count.instructions)
        for allowed, executed in zip(budget, count.instructions, strict=True):
            assert executed <= allowed, f"{count.kernel} executes {executed} instructions, its budget is {allowed}"
            assert executed >= 0.8 * allowed, f"{count.kernel} executes {executed} instructions: lower its budget"
        if AT_COPY_RATE.match(count.kernel):
            assert count.ceiling(count.plain) >= MARGIN * H200_COPY, f"{count.kernel}: {count.ceiling(count.plain):.1f}"


PLANTED = """
#include <cstdint>
template <bool kDivides, bool kWide>
__global__ void copy(const uint4* from, uint4* to, int count, int by) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    uint4 x;
    if (kWide) {
      x = from[i];
    } else {
      x = {uint32_t(by), uint32_t(by), uint32_t(by), reinterpret_cast<const uint32_t*>(from)[i]};
    }
    if (kDivides) x.x /= uint32_t(by + i);
    to[i] = x;
  }
}
template __global__ void copy<false, true>(const uint4*, uint4*, int, int);
template __global__ void copy<true, true>(const uint4*, uint4*, int, int);
template __global__ void copy<false, false>(const uint4*, uint4*, int, int);
"""


def test_planted_slow_kernels_are_seen(tmp_path: Path) -> None:
    (tmp_path / "planted.cu").write_text(PLANTED)
    compiled = compile_kernels(tmp_path / "planted.cu", tmp_path, gencode_of("9.0"))
    assert NVDISASM is not None
    _, kernels = sass.disassemble(NVDISASM, compiled.cubins[0])
    plain, divides, narrow = (
        next(sass.hot_path(blocks) for name, blocks in kernels.items() if flags in name)
        for flags in ("Lb0ELb1", "Lb1ELb1", "Lb0ELb0")
    )
    assert plain is not None and divides is not None
    assert (plain.loads, plain.stores) == (divides.loads, divides.stores)
    assert plain.loads == plain.stores > 0
    # The division of two unsigned numbers takes about twenty instructions beside a copy's handful.
    assert divides.count() / divides.loads > plain.count() / plain.loads + 12
    assert narrow is None

"""Counts of the machine instructions that a CUDA kernel executes, read from nvdisasm's listing of a cubin.

A kernel that moves memory is a loop over rows or groups of columns. Its hot path is the longest way once round that
loop which reads and writes memory in 16 bytes alone: blocks with narrower accesses are there for tensors that are not
aligned, and blocks that call a function are the slow path of a division. Where branches exclude each other the longer
one counts, so that no arguments of the kernel make it execute more.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path

import networkx as nx

_FUNCTION = re.compile(r"^\s*\.section\s+\.text\.([\w$]+)")
_LABEL = re.compile(r"^(\S+):$")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
_TARGET = re.compile(r"`\((\S+?)\)|BRANCH_TARGETS ([^\"]+)\"")
_GLOBAL = re.compile(r"(LDG|STG|LD|ST)\.E\b")


@dataclass
class Block:
    """A basic block: opcodes, and the labels where control goes next."""

    opcodes: list[str] = field(default_factory=list)
    operands: list[str] = field(default_factory=list)
    to: list[str] = field(default_factory=list)
    falls_through: bool = True

    def on_hot_path(self, without: str | None = None) -> bool:
        """Whether it calls nothing, reads and writes global memory in 16 bytes alone, and has no such operand."""
        if without is not None and any(without in operands for operands in self.operands):
            return False
        narrow = any(_GLOBAL.match(opcode) and ".128" not in opcode for opcode in self.opcodes)
        return not narrow and not any(opcode.startswith("CALL") for opcode in self.opcodes)


@dataclass(frozen=True)
class HotPath:
    """Instructions that one thread executes on the hot path."""

    opcodes: Counter[str]

    def count(self, *names: str) -> int:
        """Instructions whose opcode is one of these up to a dot; all of them if none is named."""
        return sum(n for opcode, n in self.opcodes.items() if not names or opcode.split(".")[0] in names)

    @property
    def loads(self) -> int:
        """Reads of 16 bytes of global memory."""
        return sum(n for opcode, n in self.opcodes.items() if opcode.startswith("LDG.E.128"))

    @property
    def stores(self) -> int:
        return sum(n for opcode, n in self.opcodes.items() if opcode.startswith(("STG.E.128", "ST.E.128")))

    @property
    def cycles(self) -> int:
        """Cycles that a scheduler is busy with a warp: one an instruction, unless a slower unit is busy for longer.

        Special functions and most conversions take a warp eight cycles, a shuffle four (sm_80 and sm_90: 16 and 32
        lanes a cycle and multiprocessor).
        """
        return max(self.count(), 8 * self.count("MUFU", "F2F", "F2I", "I2F"), 4 * self.count("SHFL"))


def disassemble(nvdisasm: Path, cubin: Path) -> tuple[str, dict[str, list[Block]]]:
    """The architecture of a cubin, such as sm_90, and the blocks of each kernel, by its mangled name."""
    run = subprocess.run([str(nvdisasm), "-c", str(cubin)], capture_output=True, text=True, check=True)
    architecture = re.search(r"\.target\s+(\w+)", run.stdout)
    assert architecture is not None
    return architecture[1], dict(parse(run.stdout))


def parse(listing: str) -> Iterator[tuple[str, list[Block]]]:
    """Kernels and their blocks, in the order of the listing."""
    name, lines = "", []
    for line in listing.splitlines():
        if match := _FUNCTION.match(line):
            if name:
                yield name, _blocks(lines)
            name, lines = match[1], []
        elif name:
            lines.append(line)
    if name:
        yield name, _blocks(lines)


def _blocks(lines: Iterable[str]) -> list[Block]:
    blocks, current = [], Block()
    labels: dict[str, int] = {}
    for line in lines:
        if match := _LABEL.match(line):
            if current.opcodes:
                blocks.append(current)
                current = Block()
            labels[match[1]] = len(blocks)
        elif match := _INSTRUCTION.match(line):
            guarded, opcode, operands = match.groups()
            current.opcodes.append(opcode)
            current.operands.append(operands)
            leaves = opcode.split(".")[0] in ("BRA", "BRX", "JMP", "JMX", "EXIT", "RET")
            if not leaves:
                continue
            if opcode != "BRA.DIV":  # where a warp's threads have come apart: never in these kernels
                for target, table in _TARGET.findall(line):
                    current.to += [target] if target else table.split(",")
            current.falls_through = bool(guarded) or opcode == "BRA.DIV" or _conditional(opcode, line)
            blocks.append(current)
            current = Block()
    if current.opcodes:
        blocks.append(current)
    for block in blocks:
        block.to = [str(labels[label]) for label in block.to if label in labels]
    return blocks


def _conditional(opcode: str, line: str) -> bool:
    """Whether a branch has its predicate as an operand, as those of whole warps may."""
    return opcode.startswith("BRA") and re.search(r"BRA[.\w]*\s+!?U?P\d", line) is not None


def graph(blocks: list[Block]) -> nx.DiGraph:
    """Nodes are positions of blocks; the first is 0."""
    g = nx.DiGraph()
    g.add_nodes_from(range(len(blocks)))
    for i, block in enumerate(blocks):
        g.add_edges_from((i, int(to)) for to in block.to)
        if block.falls_through and i + 1 < len(blocks):
            g.add_edge(i, i + 1)
    return g.subgraph(nx.descendants(g, 0) | {0}).copy()


def hot_path(blocks: list[Block], without: str | None = None) -> HotPath | None:
    """The longest way round the loop that has the most accesses of 16 bytes, or through a kernel without such a loop.

    An inner loop counts once. `without`: an operand, such as a constant, that tells blocks to go round. None: every way
    has narrower accesses or calls a function.
    """
    g = graph(blocks)
    loops = _wide_loops(blocks, g)
    if not loops:
        return _longest(blocks, g, set(g), 0, without)
    loop = max(loops, key=lambda nodes: _wide(blocks, nodes))
    return _longest(blocks, g, loop, _header(g, loop), without)


def hot_paths(blocks: list[Block]) -> list[HotPath]:
    """The longest way round each loop that has accesses of 16 bytes: a kernel may visit its row more than once."""
    g = graph(blocks)
    found = (_longest(blocks, g, loop, _header(g, loop), None) for loop in _wide_loops(blocks, g))
    return [path for path in found if path is not None and path.loads + path.stores]


def _wide(blocks: list[Block], nodes: Iterable[int]) -> int:
    return sum(opcode.startswith(("LDG.E.128", "STG.E.128")) for n in nodes for opcode in blocks[n].opcodes)


def _wide_loops(blocks: list[Block], g: nx.DiGraph) -> list[Set[int]]:
    return [scc for scc in nx.strongly_connected_components(g) if _loops(g, scc) and _wide(blocks, scc)]


def _loops(g: nx.DiGraph, nodes: Set[int]) -> bool:
    return len(nodes) > 1 or any(g.has_edge(n, n) for n in nodes)


def _header(g: nx.DiGraph, loop: Set[int]) -> int:
    """Where a loop is entered; the first block in memory where several are."""
    return min(n for n in loop if any(before not in loop for before in g.predecessors(n)) or n == 0)


def _longest(blocks: list[Block], g: nx.DiGraph, nodes: Set[int], entry: int, without: str | None) -> HotPath | None:
    """From `entry` to where control leaves `nodes` or comes back."""
    hot = {n for n in nodes if blocks[n].on_hot_path(without)}
    if entry not in hot:
        return None
    inside = g.subgraph(hot).copy()
    ends = {n for n in hot if g.has_edge(n, entry)} or {n for n in hot if g.out_degree(n) == 0}
    inside.remove_edges_from([(n, entry) for n in ends])
    inside = inside.subgraph(nx.descendants(inside, entry) | {entry}).copy()
    # Inner loops become one node each, with the longest way round it.
    best: dict[int, Counter[str]] = {}
    condensed = nx.condensation(inside)
    cost: dict[int, Counter[str]] = {}
    for node, members in condensed.nodes(data="members"):
        if len(members) > 1:
            round_ = _longest(blocks, inside, members, _header(inside, members), without)
            cost[node] = round_.opcodes if round_ is not None else Counter()
        else:
            cost[node] = Counter(blocks[next(iter(members))].opcodes)
    start = condensed.graph["mapping"][entry]
    for node in nx.topological_sort(condensed):
        before = [best[p] for p in condensed.predecessors(node) if p in best]
        if node == start:
            best[node] = cost[node]
        elif before:
            best[node] = max(before, key=Counter.total) + cost[node]
    finished = [best[condensed.graph["mapping"][n]] for n in ends if n in inside]
    return HotPath(max(finished, key=Counter.total)) if finished else None

"""Compiles the attention kernels ahead of time, for devices that need not be there, and reads what came out.

Run as a program it prints the table, and fails where a kernel breaks a limit:
``python -m tests.triton.compiling [all] [device] [stage] [padded D] [dropout|plain] [bf16|fp32|fp64]``.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ckptfused.triton import attention_bwd, attention_delta, attention_fwd, configs

CAPABILITIES = {"sm_90": (9, 0), "sm_80": (8, 0), "sm_100": (10, 0), "sm_120": (12, 0), "generic": (8, 6)}
TENSOR_MEMORY = 512  # columns of sm_100's
KERNELS = {
    "delta": attention_delta.attention_delta_kernel,
    "fwd": attention_fwd.attention_fwd_kernel,
    "dkdv": attention_bwd.attention_dkdv_kernel,
    "dq": attention_bwd.attention_dq_kernel,
}
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
OUTPUTS = ("o", "dq", "dk", "dv")
SUMS = ("lse", "shift", "delta")
OPTIONS = ("window", "softcap", "mask", "padding", "packed")
NARROW = {16: 8, 32: 24, 64: 48, 128: 96, 256: 192}  # of a padded D: a head that leaves a part of the row
KINDS = {1: "keep", 2: "drop", 3: "add"}  # of a mask or a padding
OPTIONAL = ("mask", "padding", "cu_seqlens", "rng_state")


@dataclass(frozen=True)
class Kernel:
    """One kernel to compile."""

    device: str
    stage: str
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    dropout: bool = False
    large: bool = False  # more calls than 32 bits number
    causal: bool = True
    options: tuple[str, ...] = ()  # of OPTIONS
    mask: int = 3  # of KINDS, where the options name it
    padding: int = 1  # likewise
    wide_mask: bool = False  # a mask to add in float32, where the products are in half precision

    @property
    def id(self) -> str:
        parts = [self.device, self.stage, f"D{self.head_dim}", TYPES[self.dtype]]
        parts += (
            ["dropout"] * self.dropout
            + ["large"] * self.large
            + (["everything"] if self.options == OPTIONS else list(self.options))
        )
        parts += [] if self.causal else ["full"]
        parts += [f"mask={KINDS[self.mask]}"] if "mask" in self.options and self.mask != 3 else []
        parts += ["mask=float32"] * self.wide_mask
        parts += [f"padding={KINDS[self.padding]}"] if "padding" in self.options and self.padding != 1 else []
        return "-".join(parts)

    @property
    def option_class(self) -> str:
        return configs.option_class(*(name in self.options for name in OPTIONS), wide=self.wide_mask)

    @property
    def config(self) -> configs.Config:
        if self.stage == "delta":
            return configs.delta_config(self.head_dim)
        capability = CAPABILITIES[self.device]
        return configs.attention_config(
            self.stage, self.dtype, self.head_dim, self.dropout, capability, self.option_class
        )


@dataclass(frozen=True)
class Result:
    """What the compiler and ptxas said."""

    registers: int
    spilled: int  # bytes, loads and stores
    stack: int
    shared: int
    tensor_memory: int  # columns
    ptx: str
    cubin: bytes
    seconds: float
    signature: dict[str, str]


def compile_kernel(k: Kernel) -> Result:
    config, element = k.config, TYPES[k.dtype]
    acc = "fp64" if element == "fp64" else "fp32"
    mask, padding = ("mask" in k.options) * k.mask, ("padding" in k.options) * k.padding
    options: dict[str, Any] = {
        "GROUP": 4,
        "CAUSAL": k.causal,
        "WINDOW": "window" in k.options,
        "SOFTCAP": "softcap" in k.options,
        "MASK": mask,
        "PADDING": padding,
        "DROPOUT": k.dropout,
        "WIDE": k.dropout and (k.large or k.dtype.itemsize != 2 or "packed" in k.options),  # as Problem.wide
        "PACKED": "packed" in k.options,
        "RAW": "softcap" not in k.options and 3 not in (mask, padding),
        "PRECISION": "ieee",
        "HEAD_DIM": k.head_dim,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": configs.block_d(k.head_dim),
        "PIECE": config.piece,
    }
    kernel = KERNELS[k.stage]
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attrs: dict[tuple[int], list[list[Any]]] = {}
    flag = "*i64" if k.dtype == torch.float64 else "*u8"
    kinds = {"mask": mask, "padding": padding}
    added = {"mask": "*fp32" if k.wide_mask else "*" + element, "padding": "*" + element}
    given = {name: added[name] if kind == 3 else flag for name, kind in kinds.items() if kind}
    given |= {"cu_seqlens": "*i32"} if "packed" in k.options else {}
    given |= {"rng_state": "*i64"} if k.dropout else {}
    for i, name in enumerate(kernel.arg_names):
        pointer = None
        if name in options:
            constants[name] = options[name]
        elif name in OPTIONAL:
            pointer = given.get(name)
            if pointer is None:
                constants[name] = None
        elif name in (*OUTPUTS, "do", "q", "k", "v"):
            pointer = "*" + element
        elif name in SUMS:
            pointer = "*" + acc
        elif name in ("scale", "softcap"):
            signature[name] = "*fp64" if acc == "fp64" else "fp32"
            continue
        elif name in ("mask_n", "padding_n"):
            constants[name] = 1
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = pointer or "i32"
        if pointer or re.fullmatch(r"(do|q|k|v|mask|padding)_[bhtmn]", name):
            attrs[(i,)] = [["tt.divisibility", 16]]
    start = time.time()
    capability = CAPABILITIES[k.device]
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attrs),
        target=GPUTarget("cuda", 10 * capability[0] + capability[1], 32),
        options={"num_warps": config.warps, "num_stages": config.stages, "maxnreg": config.registers},
    )
    seconds = time.time() - start
    registers, spilled, stack = ptxas(compiled.asm["ptx"])
    return Result(
        registers, spilled, stack, compiled.metadata.shared, getattr(compiled.metadata, "tmem_size", None) or 0,
        compiled.asm["ptx"], compiled.asm["cubin"], seconds, signature,
    )  # fmt: skip


def ptxas(ptx: str) -> tuple[int, int, int]:
    """Registers, bytes spilled and bytes of stack, as Triton's own ptxas reports them."""
    target = re.search(r"^\.target (sm_(\d+)\w*)", ptx, re.MULTILINE)
    assert target is not None
    tool = triton.knobs.nvidia.ptxas_blackwell if int(target[2]) >= 100 else triton.knobs.nvidia.ptxas
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [tool.path, "-v", f"--gpu-name={target[1]}", str(source), "-o", f"{folder}/out"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    numbers = [re.search(rf"(\d+) {what}", said) for what in ("registers", "bytes stack")]
    spills = re.findall(r"(\d+) bytes spill", said)
    assert all(numbers) and spills, said
    return int(numbers[0][1]), sum(map(int, spills)), int(numbers[1][1])  # type: ignore[index]


def parameters(cubin: bytes) -> list[tuple[int, int]]:
    """(offset, bytes) of a kernel's parameters in order, from its table in the cubin (EIATTR_KPARAM_INFO)."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.cubin"
        source.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-elf", str(source)]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    fields = re.findall(r"Ordinal\s*: 0x(\w+)\s+Offset\s*: 0x(\w+)\s+Size\s*: 0x(\w+)", said)
    found = sorted(tuple(int(number, 16) for number in each) for each in fields)
    assert [ordinal for ordinal, *_ in found] == list(range(len(found))), said
    return [(offset, size) for _, offset, size in found]


def delta_kernels() -> Iterator[Kernel]:
    """The kernels that make each row's shift and delta: of the options packing alone concerns them."""
    for device, d, dtype, options in product(CAPABILITIES, configs.BLOCK_D, TYPES, ((), ("packed",))):
        yield Kernel(device, "delta", d, dtype=dtype, options=options)


def kernels(everything: bool) -> Iterator[Kernel]:
    """The plain ones in half precision; with everything those with every set of options, and the exact types."""
    yield from delta_kernels()
    sets = [chosen for count in range(len(OPTIONS) + 1) for chosen in combinations(OPTIONS, count)]
    widths = (*configs.BLOCK_D, *NARROW.values()) if everything else configs.BLOCK_D
    for device, stage, d, dropout in product(CAPABILITIES, configs.STAGES, widths, (False, True)):
        for options, causal in product(sets if everything else ((),), (True, False)):
            for mask in (3, 1) if "mask" in options else (3,):
                yield Kernel(device, stage, d, dropout=dropout, causal=causal, options=options, mask=mask)
        for dtype in (torch.float32, torch.float64) if everything else ():
            for options in ((), OPTIONS[3:], (*OPTIONS[:2], *OPTIONS[3:]), OPTIONS):
                yield Kernel(device, stage, d, dtype=dtype, dropout=dropout, options=options)


def main() -> int:
    wanted = [word for word in sys.argv[1:] if word != "all"]
    failed = 0
    for k in kernels("all" in sys.argv[1:]):
        name = TYPES[k.dtype]
        if not all(
            w in (k.device, k.stage, str(k.head_dim), name, "dropout" if k.dropout else "plain") for w in wanted
        ):
            continue
        r = compile_kernel(k)
        bad = r.spilled or r.stack or r.shared > configs.SHARED[k.device] or r.tensor_memory > TENSOR_MEMORY
        failed += bool(bad)
        counts = {name: r.ptx.count(name) for name in ("tcgen05.mma", "wgmma.mma", "mma.sync", "cp.async", "fma.rn")}
        memory = f"{r.spilled} spilled, stack {r.stack}, shared {r.shared / 1024:.1f} KiB"
        said = f"{r.registers} registers, {memory}"
        print("BAD" if bad else "ok ", k.id, k.config, said, counts, f"{r.seconds:.1f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Compiles the attention kernels ahead of time, for devices that need not be there, and reads what came out.

Run as a program it prints the table: ``python -m tests.triton.compiling [device] [stage] [padded D]``.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ckptfused.triton import attention_bwd, attention_fwd, configs

CAPABILITIES = {"sm_90": (9, 0), "sm_80": (8, 0), "sm_86": (8, 6)}
KERNELS = {
    "fwd": attention_fwd.attention_fwd_kernel,
    "dkdv": attention_bwd.attention_dkdv_kernel,
    "dq": attention_bwd.attention_dq_kernel,
}
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
OUTPUTS = ("o", "dq", "dk", "dv")
SUMS = ("lse", "shift", "delta")
OPTIONAL = ("mask", "padding", "cu_seqlens", "rng_state")


@dataclass(frozen=True)
class Kernel:
    """One kernel to compile."""

    device: str
    stage: str
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    dropout: bool = False
    causal: bool = True
    everything: bool = False  # window, soft cap, additive mask, padding, packed sequences

    @property
    def id(self) -> str:
        parts = [self.device, self.stage, f"D{self.head_dim}", TYPES[self.dtype]]
        parts += [name for name in ("dropout", "everything") if getattr(self, name)]
        return "-".join(parts + ([] if self.causal else ["full"]))

    @property
    def config(self) -> configs.Config:
        capability = CAPABILITIES[self.device]
        return configs.attention_config(self.stage, self.dtype, self.head_dim, self.dropout, capability)


@dataclass(frozen=True)
class Result:
    """What the compiler and ptxas said."""

    registers: int
    spilled: int  # bytes, loads and stores
    stack: int
    shared: int
    ptx: str
    seconds: float


def compile_kernel(k: Kernel) -> Result:
    config, element = k.config, TYPES[k.dtype]
    acc = "fp64" if element == "fp64" else "fp32"
    options: dict[str, Any] = {
        "GROUP": 4,
        "CAUSAL": k.causal,
        "WINDOW": k.everything,
        "SOFTCAP": k.everything,
        "MASK": 3 * k.everything,
        "PADDING": 1 * k.everything,
        "DROPOUT": k.dropout,
        "PACKED": k.everything,
        "RAW": not k.everything,
        "PRECISION": "ieee",
        "HEAD_DIM": k.head_dim,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": configs.block_d(k.head_dim),
    }
    kernel = KERNELS[k.stage]
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attrs: dict[tuple[int], list[list[Any]]] = {}
    given = (
        {"mask": "*" + element, "padding": "*i64" if k.dtype == torch.float64 else "*u8", "cu_seqlens": "*i32"}
        if k.everything
        else {}
    )
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
        options={"num_warps": config.warps, "num_stages": config.stages},
    )
    seconds = time.time() - start
    registers, spilled, stack = ptxas(compiled.asm["ptx"])
    return Result(registers, spilled, stack, compiled.metadata.shared, compiled.asm["ptx"], seconds)


def ptxas(ptx: str) -> tuple[int, int, int]:
    """Registers, bytes spilled and bytes of stack, as Triton's own ptxas reports them."""
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name={target[1]}", str(source), "-o", f"{folder}/out"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    numbers = [re.search(rf"(\d+) {what}", said) for what in ("registers", "bytes stack")]
    spills = re.findall(r"(\d+) bytes spill", said)
    assert all(numbers) and spills, said
    return int(numbers[0][1]), sum(map(int, spills)), int(numbers[1][1])  # type: ignore[index]


def main() -> None:
    wanted = sys.argv[1:]
    for device in CAPABILITIES:
        for stage in configs.STAGES:
            for d in configs.BLOCK_D:
                for dropout in (False, True):
                    k = Kernel(device, stage, d, dropout=dropout)
                    if all(w in (device, stage, str(d)) or w == ("dropout" if dropout else "plain") for w in wanted):
                        r = compile_kernel(k)
                        counts = {name: r.ptx.count(name) for name in ("wgmma.mma", "mma.sync", "cp.async", "fma.rn")}
                        memory = f"{r.spilled} spilled, stack {r.stack}, shared {r.shared / 1024:.1f} KiB"
                        print(
                            k.id,
                            k.config,
                            f"{r.registers} registers, {memory}",
                            counts,
                            f"{r.seconds:.1f} s",
                            flush=True,
                        )


if __name__ == "__main__":
    main()

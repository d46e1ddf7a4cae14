"""Compiles the FFN kernels ahead of time, for devices that need not be there, and reads what came out.

Run as a program it prints the table: ``python -m tests.triton.ffn_compiling [part of an id]``.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ckptfused.triton.ffn import kernels
from ckptfused.triton.ffn.configs import CANDIDATES, FFNConfig
from tests.triton.compiling import CAPABILITIES, ptxas

KERNELS = {"fwd": kernels.ffn_up_fwd_kernel, "bwd": kernels.ffn_up_bwd_kernel}


@dataclass(frozen=True)
class Kernel:
    """One kernel to compile."""

    device: str
    stage: str
    config: FFNConfig
    act: str = "silu"
    gated: bool = True
    kept: bool = False
    dropout: bool = False
    everything: bool = False  # dropout, biases, g and u stored, transposed weights, tails, rows mapped
    aligned: bool = True
    element: str = "bf16"

    @property
    def id(self) -> str:
        act = {"silu": "swiglu"}.get(self.act, self.act) if self.gated else self.act
        parts = [self.device, self.stage, self.config.name, act, self.element]
        parts += [name for name in ("kept", "dropout", "everything") if getattr(self, name)]
        return "-".join(parts + ([] if self.aligned else ["unaligned"]))

    def pointers(self) -> dict[str, str]:
        """The tensors that are there, and their types."""
        names = {"h", "up_w", "x"} if self.stage == "fwd" else {"h", "du", "x", "up_w", "ddown", "down_w"}
        names |= {"up_b"} if self.everything else set()
        names |= {"u_out"} if self.everything and self.stage == "fwd" else set()
        if self.gated:
            names |= {"gate_w"} | ({"dg"} if self.stage == "bwd" else set())
            names |= ({"gate_b"} | ({"g_out"} if self.stage == "fwd" else set())) if self.everything else set()
        if self.kept:
            names = names - {"x", "up_w", "gate_w", "up_b", "gate_b"} | {"u_in"} | ({"g_in"} if self.gated else set())
        found = dict.fromkeys(names, "*" + self.element)
        return found | ({"rng_state": "*i64"} if self.dropout or self.everything else {})


OPTIONAL = ("x", "gate_w", "up_w", "gate_b", "up_b", "rng_state", "h", "g_out", "u_out", "g_in", "u_in", "dg", "du")


@dataclass(frozen=True)
class Result:
    """What the compiler and ptxas said."""

    registers: int
    spilled: int  # bytes, loads and stores
    stack: int
    shared: int
    tensor_memory: int  # columns
    ptx: str
    seconds: float

    @property
    def products(self) -> set[str]:
        """The tensor-core instructions with their shapes, which those of the tensor memory read from a register."""
        found = re.findall(r"(wgmma\.mma_async|mma)\.sync\.aligned\.(m\d+n\d+k\d+)", self.ptx)
        own = {f"{'wgmma' if kind.startswith('wgmma') else 'mma'}.{shape}" for kind, shape in found}
        return own | set(re.findall(r"tcgen05\.mma\.[\w.:]+", self.ptx))


def compile_kernel(k: Kernel) -> Result:
    kernel, config, even = KERNELS[k.stage], k.config, not k.everything
    options: dict[str, Any] = {
        "ACT": k.act, "GATED": k.gated, "DROPOUT": k.dropout or k.everything, "SITE": 2, "MAPPED": k.everything,
        "ALIGNED": k.aligned, "EVEN_N": even, "EVEN_K": even, "KEPT": k.kept, "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP_M": config.group_m,
    }  # fmt: skip
    pointers = k.pointers()
    unit = {"gate_n", "up_n", "down_k"} if k.everything else {"gate_k", "up_k", "down_n"}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attrs: dict[tuple[int], list[list[Any]]] = {}
    for i, name in enumerate(kernel.arg_names):
        if name in options:
            constants[name] = options[name]
        elif name in OPTIONAL and name not in pointers:
            constants[name] = None
        elif name in unit:
            constants[name] = 1
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = pointers.get(name, "*" + k.element if name in ("ddown", "down_w") else "i32")
        # ffn_choice takes no lengths but multiples of 16.
        if name in (*pointers, "ddown", "down_w", "cols", "depth") or re.fullmatch(r"[a-z]+_[mnk]", name):
            attrs[(i,)] = [["tt.divisibility", 16]]
    start = time.time()
    capability = CAPABILITIES[k.device]
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attrs),
        target=GPUTarget("cuda", 10 * capability[0] + capability[1], 32),
        options={"num_warps": config.warps, "num_stages": config.stages},
    )
    registers, spilled, stack = ptxas(compiled.asm["ptx"])
    memory = (compiled.metadata.shared, getattr(compiled.metadata, "tmem_size", None) or 0)
    return Result(registers, spilled, stack, *memory, compiled.asm["ptx"], time.time() - start)


def kernels() -> Iterator[Kernel]:
    """What tests compile: for every tile the plain kernels, and the one with the most in it."""
    for device, configs in CANDIDATES.items():
        for config in configs:
            yield Kernel(device, "fwd", config)
            yield Kernel(device, "bwd", config)
            yield Kernel(device, "fwd", config, act="gelu", everything=True)
            yield Kernel(device, "bwd", config, act="gelu", everything=True)
        yield Kernel(device, "bwd", configs[0], kept=True, dropout=True)
        yield Kernel(device, "bwd", configs[0], act="gelu_tanh", gated=False, dropout=True, element="fp16")
        yield Kernel(device, "fwd", configs[0], act="relu2", gated=False)
        yield Kernel(device, "fwd", configs[0], act="quick_gelu", dropout=True, aligned=False)
        yield Kernel(device, "bwd", configs[0], act="quick_gelu", dropout=True, aligned=False)


def main() -> None:
    for k in kernels():
        if all(part in k.id for part in sys.argv[1:]):
            r = compile_kernel(k)
            products, shared = " ".join(sorted(r.products)), f"{r.shared / 1024:.1f} KiB"
            print(
                f"{k.id}: {r.registers} registers, {r.spilled} spilled, {shared}, {products}, {r.seconds:.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()

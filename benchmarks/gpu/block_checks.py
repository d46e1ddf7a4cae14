"""Blocks, and their halves alone, with every kind of kernel inside: output and all gradients against float64.

Gross faults are looked for here, in seconds; the suite holds the exact rule of errors.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.differences import relative_error, worst
from ckptfused import functional, rng
from ckptfused._extension import _C
from ckptfused.eager import dropout_masks, eager_block
from ckptfused.spec import AttentionSpec, BlockSpec, FFNSpec, param_shapes

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts: for the check of equal bits
DTYPE = torch.bfloat16
TIMES_EAGER = 4
"""The multiple of the error that eager PyTorch makes in the same type, with an ulp beside where it makes next to none.
"""
SEED = 7


@dataclass(frozen=True)
class Check:
    """A block and the sizes of its input."""

    spec: BlockSpec
    batch: int = 1
    tokens: int = 301
    width: int = 256
    bounds: tuple[int, ...] = ()
    """Bounds of packed sequences."""
    biases: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


ATTN = AttentionSpec(4, 2, 128, pre="rmsnorm", causal=True, rope="half")
FFN = FFNSpec("swiglu", 704, pre="rmsnorm")
DROPPING = replace(FFN, p_hidden=0.25, p_res=0.1)
CHECKS = {
    "block": Check(BlockSpec(ATTN, FFN), tokens=601),
    "block with dropout": Check(BlockSpec(replace(ATTN, p_attn=0.2, p_res=0.1), DROPPING), tokens=601),
    "block with LayerNorm, biases and a mask": Check(
        BlockSpec(
            replace(ATTN, pre="layernorm", qk_norm="layernorm", causal=False, mask="keep"),
            FFNSpec("gelu", 704, pre="layernorm"),
        ),
        biases=True,
    ),
    "block in tiles of columns": Check(BlockSpec(ffn=replace(DROPPING, hidden=4096), scratch=1 << 21), tokens=601),
    "block in tiles of rows": Check(BlockSpec(ffn=replace(DROPPING, hidden=128), scratch=1 << 20), tokens=5001),
    "attention with dropout": Check(BlockSpec(replace(ATTN, p_attn=0.1))),
    "attention with a window and soft-cap": Check(BlockSpec(replace(ATTN, p_attn=0.1, window=70, softcap=5.0))),
    "attention over packed sequences": Check(
        BlockSpec(replace(ATTN, p_attn=0.1, packed=True, rope="none")), bounds=(0, 1, 130, 301)
    ),
    "attention with padding": Check(BlockSpec(replace(ATTN, head_dim=64, causal=False, padding="keep")), batch=2),
    "FFN in Triton": Check(BlockSpec(ffn=replace(DROPPING, hidden=336)), environment={"CKPTFUSED_FFN": "triton"}),
}


def small(check: Check) -> Check:
    """For a CPU: the same options."""
    bounds = (0, 1, 13, 37) if check.bounds else ()
    attn = None if check.spec.attn is None else replace(check.spec.attn, head_dim=16)
    ffn = None if check.spec.ffn is None else replace(check.spec.ffn, hidden=min(check.spec.ffn.hidden, 96))
    return replace(check, spec=replace(check.spec, attn=attn, ffn=ffn), tokens=37, width=48, bounds=bounds)


Values = dict[str, Tensor]


def inputs(check: Check, device: str) -> tuple[Values, Values]:
    """x, dy and parameters of the size that a trained model has; masks, tables and bounds. Drawn on the CPU."""
    spec, generator = check.spec, torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    given = {name: normal(check.batch, check.tokens, check.width) for name in ("x", "dy")}
    for name, (shape, _) in param_shapes(spec, check.width).items():
        matrix = len(shape) == 2
        given[name] = normal(*shape) * (shape[-1] ** -0.5 if matrix else 0.2)
        if not matrix and name.endswith("_w"):
            given[name] += 1
    aux: Values = {}
    if (attn := spec.attn) is not None:
        if attn.rope != "none":
            angle = torch.arange(check.tokens)[:, None] * 10.0 ** -torch.linspace(0, 2, attn.head_dim // 2)
            aux |= {"cos": angle.cos(), "sin": angle.sin()}
        if attn.mask != "none":
            aux["mask"] = torch.rand(check.batch, 1, check.tokens, check.tokens, generator=generator) < 0.7
        if attn.padding != "none":
            lengths = torch.tensor([check.tokens, check.tokens // 2])[: check.batch]
            aux["padding"] = torch.arange(check.tokens) < lengths[:, None]
        if check.bounds:
            aux["cu_seqlens"] = torch.tensor(check.bounds, dtype=torch.int32)
    given = {name: t.to(device, DTYPE) for name, t in given.items() if check.biases or not name.endswith("_b")}
    return given, {name: t.to(device) for name, t in aux.items()}


def gradients(check: Check, given: Values, aux: Values, masks: dict[int, Tensor] | None, **how: Any) -> Values:
    """y and every gradient. masks: of eager PyTorch's dropout; None: the fused block, from the seed."""
    leaves = {name: t.detach().requires_grad_() for name, t in given.items() if name != "dy"}
    params = {name: t for name, t in leaves.items() if name != "x"}
    if masks is not None:
        how |= aux
        y = eager_block(leaves["x"], params, check.spec, masks=masks, **how)
    else:
        generator = torch.Generator(given["x"].device).manual_seed(SEED)
        spec = check.spec
        call: Any = functional.block if spec.attn and spec.ffn else functional.attention_block
        call = functional.ffn_block if spec.attn is None else call
        y = call(leaves["x"], params, spec, **aux, generator=generator)
    found = torch.autograd.grad(y, list(leaves.values()), given["dy"].to(y.dtype))
    return {"y": y.detach(), **{f"d {name}": grad for name, grad in zip(leaves, found, strict=True)}}


def run(name: str, device: str, tiny: bool) -> str:
    """Raises, with the worst element of each wrong tensor, unless all are right."""
    check = small(CHECKS[name]) if tiny else CHECKS[name]
    given, aux = inputs(check, device)
    wide = {key: t.double() for key, t in given.items()}
    state = rng.state(given["x"], torch.Generator(given["x"].device).manual_seed(SEED))
    bounds = aux["cu_seqlens"].cpu() if "cu_seqlens" in aux else None
    masks = dropout_masks(check.spec, check.batch, check.tokens, check.width, state.cpu(), bounds)
    masks = {site: mask.to(device) for site, mask in masks.items()}
    right, eager = gradients(check, wide, aux, masks), gradients(check, given, aux, masks, eager=True)
    with mock.patch.dict(os.environ, check.environment):
        found = gradients(check, given, aux, None)
    wrong = []
    for key, true in right.items():
        like = right.get(key.replace("attn.k_", "attn.q_"), true) if key.endswith("_b") else true
        scale = float(true.norm() / like.norm().clamp(min=true.norm()))  # a key's bias cancels in softmax
        error = scale * relative_error(found[key], true)
        allowed = scale * TIMES_EAGER * relative_error(eager[key], true) + torch.finfo(DTYPE).eps
        if not error <= allowed:
            wrong.append(f"{key}: error {error:.3g}, allowed {allowed:.3g}; {worst(found[key], true)}")
    if wrong:
        raise SystemExit("\n".join(wrong))
    return f"{len(found)} tensors"


RECORDED = ("block with dropout", "attention with a window and soft-cap", "attention over packed sequences")
CALLS = 3
"""Calls of attention's own kernels in a step: forward, its replay, the gradients."""


def recorded(name: str, device: str, tiny: bool) -> str:
    """Launches made by Triton in Python, and the same repeated from their records, give the same bits. On a GPU raises,
    too, unless all were repeated. (On the CPU nothing goes through Triton, and there is nothing to repeat.)"""
    torch.use_deterministic_algorithms(True)  # cuBLAS, too, is to give the same bits twice
    expected = CALLS * (device == "cuda")
    for each in RECORDED:
        check = small(CHECKS[each]) if tiny else CHECKS[each]
        given, aux = inputs(check, device)
        _C.testing.use_launch_records(False)
        by_triton = gradients(check, given, aux, None)
        _C.testing.use_launch_records(True)
        gradients(check, given, aux, None)  # makes the records
        before = _C.testing.launch_record_hits()
        repeated = gradients(check, given, aux, None)
        if (hits := _C.testing.launch_record_hits() - before) != expected:
            raise SystemExit(f"{each}: expected {expected} calls from records, got {hits}")
        wrong = [
            f"{each}: {key}: {worst(repeated[key], t)}" for key, t in by_triton.items() if not repeated[key].equal(t)
        ]
        if wrong:
            raise SystemExit("\n".join(wrong))
    _C.testing.use_launch_records(False)
    return f"{len(RECORDED)} blocks, {expected} calls each from records"

"""A tensor whose storage was resized is refused by name: nothing reads memory that is not there any more.

Resizing a storage leaves the version counter alone, so that a saved tensor tells autograd nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils._pytree import tree_map_only

import ckptfused
from ckptfused import FusedCheckpointBlock, FusedCheckpointSequential
from ckptfused.spec import AUX_NAMES, param_names
from tests.cases import Case
from tests.devices import on_devices
from tests.ops.attention_calls import Case as AttentionCase
from tests.ops.attention_calls import make_call
from tests.ops.test_opcheck import small_op_args
from tests.oracle import Inputs, fused, make_inputs, rng_state

OPS = torch.ops.ckptfused
BLOCK = Case(mask="keep+pad", rope="half", drop="all", batch=2, tokens=33, lora="float32", norm="rmsnorm")
CASES = (
    BLOCK,
    Case(mask="packed", layout="post", weights="joint", act="relu", tokens=33, transposed=True),
    Case(mask="add4d", layout="attn", qk_norm="rmsnorm", tokens=33, seq_first=True, batch=2),
    Case(layout="ffn", act="geglu", tokens=33),
)
# Nothing at all, and a byte less than is needed: the first is a null pointer, the second a read past the end.
SIZES = {"freed": lambda nbytes: 0, "short": lambda nbytes: nbytes - 1}


def _resize(t: Tensor, size: str) -> None:
    t.untyped_storage().resize_(SIZES[size](t.untyped_storage().nbytes()))


def _leaves(case: Case, device: str) -> Inputs:
    """Inputs with memory of its own for every tensor."""
    inputs = make_inputs(case, torch.float32, device=device).clone()
    params = {name: t.requires_grad_() for name, t in inputs.params.items()}
    return replace(inputs, x=inputs.x.requires_grad_(), params=params)


def _argument(case: Case, name: str) -> str:
    """How an error of the op calls this tensor."""
    return rf"params\[{param_names(case.spec()).index(name)}\]" if "." in name else name


NAMES = [(case, name) for case in CASES for name in make_inputs(case).tensors()]


@on_devices
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("case", "name"), NAMES, ids=lambda v: v if isinstance(v, str) else v.layout)
def test_backward_refuses_it(case: Case, name: str, size: str, device: str) -> None:
    inputs = _leaves(case, device)
    y = fused(case.spec())(inputs)
    _resize(inputs.tensors()[name].detach(), size)
    argument = _argument(case, name.removeprefix("aux."))
    with pytest.raises(RuntimeError, match=rf"{argument}: expected \d+ bytes of memory .* not allocated yet"):
        y.backward(inputs.dy)


@on_devices
@pytest.mark.parametrize("name", ["x", "attn.q_w", "attn.lora0.a", "aux.cos", "aux.mask"])
def test_forward_refuses_it(name: str, device: str) -> None:
    inputs = _leaves(BLOCK, device)
    _resize(inputs.tensors()[name].detach(), "freed")
    with pytest.raises(RuntimeError, match=r"expected \d+ bytes of memory .* not allocated yet"):
        fused(BLOCK.spec())(inputs)


@on_devices
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", ["pre", "post", "sandwich"])
def test_a_kept_value_or_the_random_state(layout: str, size: str, device: str) -> None:
    """A saved-tensor hook may give back what it likes."""
    case = replace(BLOCK, layout=layout, keep="all")
    inputs, spec = make_inputs(case, torch.float32, device=device), case.spec()
    params = [inputs.params.get(name) for name in param_names(spec)]
    aux = [inputs.aux.get(name) for name in AUX_NAMES]
    state, text = rng_state(inputs.x), spec.to_string()
    _, *kept = OPS.block_fwd(inputs.x, params, aux, state, text, True)
    needs = [True, *(p is not None for p in params)]
    for i in range(len(kept) + 1):
        values, seed = [t.clone() for t in kept], state.clone()
        _resize([*values, seed][i], size)
        name = rf"kept\[{i}\]" if i < len(kept) else "rng_state"
        with pytest.raises(RuntimeError, match=rf"{name}: expected \d+ bytes of memory"):
            OPS.block_bwd(inputs.dy, inputs.x, params, aux, values, seed, text, needs)


@on_devices
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", ["block", "segment", "checkpoint", "outer"])
def test_modules(way: str, size: str, device: str) -> None:
    """The module that the report was about, alone, in a segment, and replayed by somebody else."""
    blocks = [FusedCheckpointBlock.llama(32, 4, 64).to(device) for _ in range(2)]
    call: dict[str, Callable[[Tensor], Tensor]] = {
        "block": blocks[0],
        "segment": FusedCheckpointSequential(*blocks),
        "checkpoint": lambda x: ckptfused.checkpoint(blocks[0], x),
        "outer": lambda x: torch.utils.checkpoint.checkpoint(blocks[0], x, use_reentrant=False),
    }
    x = torch.zeros(2, 5, 32, device=device)
    y = call[way](x)
    _resize(x, size)
    with pytest.raises(RuntimeError, match="is not allocated yet|whose data is allocated"):
        y.sum().backward()


def _refused(op: str, args: tuple[Any, ...], size: str) -> None:
    """Each tensor among the arguments in turn."""
    names = [argument.name for argument in getattr(OPS, op).default._schema.arguments]
    tensors = [i for i, argument in enumerate(args) if isinstance(argument, Tensor)]
    for i in tensors:
        own = tree_map_only(Tensor, lambda t: t.clone(memory_format=torch.preserve_format), args)
        _resize(own[i], size)
        with pytest.raises(RuntimeError, match=rf"{op}: {names[i]}: expected \d+ bytes of memory"):
            getattr(OPS, op)(*own)


SMALL = ("norm", "residual", "activation", "qk")


@on_devices
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", [f"{stem}_{way}" for stem in SMALL for way in ("fwd", "bwd")])
def test_small_ops(op: str, size: str, device: str) -> None:
    _refused(op, tree_map_only(Tensor, lambda t: t.to(device), small_op_args()[op]), size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "case",
    [
        AttentionCase(mask="keep", padding="drop", p=0.2, dtype=torch.float32),
        AttentionCase(mask="add", padding="add", dtype=torch.bfloat16),
        AttentionCase(batch=1, packed=(0, 20, 67), dtype=torch.float32),
        AttentionCase(dtype=torch.float32),
    ],
    ids=lambda case: case.id,
)
def test_attention(case: AttentionCase, size: str) -> None:
    call = make_call(case)
    o, lse = call.forward()
    _refused("attention_fwd", (call.q, call.k, call.v, *call.rest), size)
    _refused("attention_bwd", (call.dout, call.q, call.k, call.v, o, lse, *call.rest), size)


def test_dropout_mask() -> None:
    state = torch.tensor([3, 0])
    _resize(state, "freed")
    with pytest.raises(RuntimeError, match=r"dropout_mask: rng_state: expected 16 bytes of memory"):
        OPS.dropout_mask((4, 4), 0.5, state, 0)

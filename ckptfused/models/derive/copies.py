"""Copies of a layer: in float64 with random weights for the proof, without data for other shapes."""

from __future__ import annotations

import copy
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ckptfused.compat.torch_distributed import composable_names, own_class
from ckptfused.compat.transformers import is_checkpointing_layer
from ckptfused.layer.quantized import is_quantized, stack_numbers, unparametrized
from ckptfused.layer.shards import is_fully_sharded
from ckptfused.layer.source import is_patched
from ckptfused.models.derive.factors import stand_in
from ckptfused.models.derive.recording.held import held_by
from ckptfused.models.derive.recording.recorder import RefusedError
from ckptfused.models.describe.own_forward import forget_places
from ckptfused.models.experts.adapters import adds_adapters, wrapped
from ckptfused.simulate.meta_copy import data_behind

_HOOKS = tuple(name for name in vars(nn.Module()) if "hook" in name)
_COPIED: Any = (nn.Module, Tensor, list, dict, tuple, set)

MOST_WEIGHTS = 2**22
"""Random numbers that the weights of a layer are made of for its proof: a tenth of a second."""


class TooManyError(RefusedError):
    """A layer with more numbers in its weights than are made for a proof."""


class Reading(NamedTuple):
    """How a layer is read: what of it is not, and is called as it is, and what its x is."""

    modules: Mapping[str, nn.Module] = types.MappingProxyType({})
    """What stands in copies of the layer for modules within, by their names."""
    calls: frozenset[tuple[str, str]] = frozenset()
    """Calls of the layer's own code: what, and in which line."""
    seq_first: bool = False
    """Whether x is [T, B, C]."""
    streams: bool = False
    """Whether x is the first two tensors of a call, side by side, and what becomes of both is returned (Flux)."""

    @property
    def of_record(self) -> dict[str, Any]:
        """What `record` is told of it."""
        return {"opaque": self.calls, "seq_first": self.seq_first, "streams": self.streams}


PLAIN_READING = Reading()


def layer_copy(
    layer: nn.Module, made: Callable[[Tensor, bool], Tensor], placed: bool = True, reading: Reading = PLAIN_READING
) -> nn.Module:
    """A copy of a layer as its class runs it: no forward of its own, no hooks, no adapters. What is no module, tensor
    or container is shared. made: the tensor in another's place; the flag says that it is a parameter. placed: it knows
    where in the model it stands. reading: what stands for modules within.

    **Raises** `RefusedError` where it cannot be copied.
    """
    memo: dict[int, Any] = {id(layer.get_submodule(name)): stand for name, stand in reading.modules.items()}
    stored: dict[nn.Module, nn.Module] = {}
    for module in _copied(layer, reading):
        if module is not layer and is_quantized(module):
            memo[id(module)] = plain = OfNumbers(module)
            for name, numbers in plain.named_parameters():
                setattr(plain, name, nn.Parameter(made(numbers.detach(), True)))
            continue
        for t in module._parameters.values():
            if t is not None and id(t) not in memo:
                if not t.is_floating_point():
                    raise RefusedError(f"weights of type {t.dtype}")
                memo[id(t)] = nn.Parameter(made(t.detach(), True))
        for key, t in held_by(module):
            if isinstance(t, Tensor):
                memo.setdefault(id(t), made(data_behind(t).detach(), False))
            elif not (isinstance(t, _COPIED) or key.endswith("]")):
                memo[id(t)] = t
            if key == "forward" and module is not layer and is_patched(module):
                raise RefusedError("a module within has a forward of its own")
        if of_stacks := {name: nn.Parameter(made(t, True)) for name, t in stack_numbers(module).items()}:
            memo |= {id(p): p for p in of_stacks.values()}
            stored[module] = unparametrized(module)
            stored[module]._parameters |= of_stacks
    shell = stored.pop(layer, None) or _whole(layer)
    vars(shell).pop("forward", None)
    try:
        memo |= {id(module): copy.deepcopy(plain, memo) for module, plain in stored.items()}
        found: nn.Module = copy.deepcopy(shell, memo)
    except (TypeError, RuntimeError, AttributeError, NotImplementedError) as error:
        raise RefusedError(f"it cannot be copied: {error}") from error
    memo[id(layer)] = found
    for module in filter(adds_adapters, layer.modules()):
        memo.pop(id(module.base_layer), None)  # whoever calls it calls no adapter
    for module in found.modules():
        if is_checkpointing_layer(module):
            vars(module)["gradient_checkpointing"] = False  # a replay has its own values, which no recording knows
        for name, held in vars(module).items():
            if name in _HOOKS and isinstance(held, dict):
                held.clear()
            elif isinstance(held, types.FunctionType):
                vars(module)[name] = _closed_over(held, memo)
        for name, child in module._modules.items():
            if child is not None and adds_adapters(child):
                module._modules[name] = wrapped(child.base_layer)  # type: ignore[assignment]
    if not placed:
        forget_places(found)
    return found


class OfNumbers(nn.Linear):
    """What stands in copies for a linear layer whose weight is stored in few bits: one whose weight has numbers. It
    computes in the type of its input, as that one does that is fused.
    """

    def __init__(self, module: Any) -> None:
        super().__init__(module.in_features, module.out_features, module.bias is not None, device="meta")
        self.train(module.training)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


def _whole(layer: nn.Module) -> nn.Module:
    """A shallow copy of a layer; of one that `fully_shard` was applied to, of the class that it had before, and without
    what FSDP put into it: its hooks and its state, which hold the layer itself.
    """
    if not is_fully_sharded(layer):
        return copy.copy(layer)
    own = own_class(type(layer))
    made: nn.Module = own.__new__(own)
    for name, value in vars(layer).items():
        if name not in composable_names():
            vars(made)[name] = type(value)() if name in _HOOKS and isinstance(value, dict) else value
    return made


def _closed_over(function: types.FunctionType, copies: dict[int, Any]) -> types.FunctionType:
    """A function that a layer holds (minGPT's lambda), with the copies in the place of the modules that it is closed
    over.
    """
    cells: list[Any] = []
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not yet assigned
            value = None
        known = isinstance(value, nn.Module) and id(value) in copies
        cells.append(types.CellType(copies[id(value)]) if known else cell)
    code, name, defaults = function.__code__, function.__name__, function.__defaults__
    made = types.FunctionType(code, function.__globals__, name, defaults, tuple(cells) or None)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _copied(layer: nn.Module, reading: Reading) -> Iterator[nn.Module]:
    """The modules of a layer without those that something stands for, and those that make numbers of stored stacks."""
    apart = {id(module) for name in reading.modules for module in layer.get_submodule(name).modules()}
    for module in filter(stack_numbers, layer.modules()):
        apart |= {id(within) for within in module.get_submodule("parametrizations").modules()}
    return (module for module in layer.modules() if id(module) not in apart)


def wide(
    layer: nn.Module,
    generator: torch.Generator,
    placed: bool = True,
    dense: bool = False,
    reading: Reading = PLAIN_READING,
) -> nn.Module:
    """A copy in float64 on the CPU: weights are random, buffers as they were. dense: no matrix is a `stand_in`."""
    stands = (lambda t: None) if dense else stand_in
    sizes: Counter[str] = Counter()
    for name, p in layer_without_data(layer, placed, reading).named_parameters():
        sizes[name.partition(".")[0]] += p.numel() if stands(p) is None else 0
    if (size := sizes.total()) > MOST_WEIGHTS:
        raise TooManyError(
            f"{size:,} numbers in weights that are used otherwise than in products, more than {MOST_WEIGHTS:,}",
            within=sizes.most_common(1)[0][0],
        )

    def made(t: Tensor, parameter: bool) -> Tensor:
        if not parameter:
            if t.is_meta:
                raise RefusedError("a buffer without data")
            dtype = torch.promote_types(t.dtype, torch.float64) if t.is_floating_point() or t.is_complex() else t.dtype
            return t.to("cpu", dtype, copy=True)
        if (stand := stands(t)) is not None:
            return stand
        found = torch.randn(t.shape, dtype=torch.float64, generator=generator)
        return found / t.shape[-1] ** 0.5 if t.dim() > 1 else found * 0.4 + 0.6

    return layer_copy(layer, made, placed, reading)


def layer_without_data(layer: nn.Module, placed: bool = True, reading: Reading = PLAIN_READING) -> nn.Module:
    """A copy on the meta device."""
    return layer_copy(layer, _shape_of, placed, reading)


def _shape_of(t: Tensor, parameter: bool) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")

"""Copies of a layer and of a call: in float64 with random weights for the proof, without data for other shapes."""

from __future__ import annotations

import copy
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ckptfused.compat.pytree import tree_flatten, tree_unflatten
from ckptfused.compat.torch_distributed import composable_names, own_class
from ckptfused.compat.transformers import is_checkpointing_layer
from ckptfused.layer.quantized import is_quantized, stack_numbers, unparametrized
from ckptfused.layer.shards import is_fully_sharded
from ckptfused.layer.source import is_patched
from ckptfused.models.derive.factors import stand_in
from ckptfused.models.derive.recording.held import held_by
from ckptfused.models.derive.recording.recorder import RefusedError
from ckptfused.models.derive.rules.mask_forms import HIDES
from ckptfused.models.derive.rules.rotations import MOST_FIRST, like_table
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
    """How a layer is read: what of it is not, and is called as it is, and whether its x is [T, B, C]."""

    modules: Mapping[str, nn.Module] = types.MappingProxyType({})
    """What stands in copies of the layer for modules within, by their names."""
    calls: frozenset[tuple[str, str]] = frozenset()
    """Calls of the layer's own code: what, and in which line."""
    seq_first: bool = False


PLAIN_READING = Reading()


class Sizes(NamedTuple):
    """The batch and the tokens of a call, and how many of these its tables leave out at the front."""

    batch: int
    tokens: int
    first: int = 0

    @classmethod
    def of(cls, args: Any, kwargs: Any) -> Sizes:
        """The sizes of a call with x [B, T, C], its first tensor; of tables two are alike."""
        x, *others = (leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor))
        if x.dim() != 3:
            raise RefusedError("the layer is not called with x [B, T, C]")
        shapes = Counter(t.shape for t in others if t.is_floating_point() and t.dim() in (2, 3))
        rows = (shape[-2] for shape, _ in shapes.most_common() if shape[-1] % 2 == 0)
        left_out = (x.size(1) - n for n in rows if 0 < x.size(1) - n <= MOST_FIRST)
        return cls(x.size(0), x.size(1), next(left_out, 0))


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


def resized_call(
    args: Any, kwargs: Any, sizes: Sizes, generator: torch.Generator, first_key: bool, folded: bool = False
) -> tuple[Any, Any]:
    """A call of other sizes with random values in float64. first_key: what boolean masks say of the first key. folded:
    what is [n, 1 or T, T] has an entry for each head of each batch element, not for each head; what is [B, …, C], or
    [B] integers, goes with the batch alone, whatever else is as long as x.
    """
    leaves, tree = tree_flatten((args, kwargs))
    x = next(leaf for leaf in leaves if isinstance(leaf, Tensor))
    was = sizes._replace(batch=x.size(0), tokens=x.size(1))
    made = []
    for leaf in leaves:
        if leaf is x:
            made.append(torch.randn(*sizes[:2], x.size(2), dtype=torch.float64, generator=generator).requires_grad_())
        elif isinstance(leaf, Tensor):
            found = _resized(leaf, was, sizes, generator, first_key, folded)
            if folded and (shape := _by_batch(leaf, was, sizes, x.size(2))) is not None:
                found = torch.randn(shape, dtype=torch.float64, generator=generator)
                found = found if leaf.is_floating_point() else torch.arange(sizes.batch, dtype=leaf.dtype)
            made.append(found.requires_grad_(leaf.requires_grad and found.is_floating_point()))
        else:
            made.append(leaf)
    return tree_unflatten(made, tree)


def _by_batch(t: Tensor, was: Sizes, now: Sizes, width: int) -> tuple[int, ...] | None:
    """The shape of a condition in another batch; None of what may not be one."""
    if t.dim() == 1 and not t.is_floating_point() and t.dtype != torch.bool:
        return (now.batch,) if t.size(0) == was.batch else None
    is_one = t.is_floating_point() and t.dim() in (2, 3) and t.size(0) == was.batch and t.size(-1) == width
    return (now.batch if was.batch > 1 else 1, *t.shape[1:]) if is_one else None


def _resized(t: Tensor, was: Sizes, now: Sizes, generator: torch.Generator, first_key: bool, folded: bool) -> Tensor:
    if t.is_complex():
        return torch.view_as_complex(_resized(torch.view_as_real(t), was, now, generator, first_key, folded))
    adds = _adds(t, was.tokens)
    turned = (was.tokens, was.tokens - was.first)
    table = t.is_floating_point() and t.dim() in (2, 3) and t.size(-2) in turned and not adds
    pairs = t.is_floating_point() and t.dim() > 2 and t.size(-1) == 2
    folded = adds or (folded and t.dim() == 3 and t.size(1) in (1, was.tokens) and t.size(2) == was.tokens)
    shape = list(t.shape)
    for i, size in enumerate(shape):
        if i == 0 and size == was.batch and (t.dim() > 1 or size != was.tokens) and not (t.dim() == 2 and table):
            shape[i] = now.batch if size > 1 else 1
        elif i == 0 and folded and t.dim() == 3 and size % was.batch == 0 and size > 1:
            shape[i] = size // was.batch * now.batch
        elif pairs and was.tokens in t.shape[:i]:
            continue
        elif was.first and i == t.dim() - 2 and size == was.tokens - was.first and t.is_floating_point():
            shape[i] = now.tokens - now.first
        elif size == was.tokens and not (table and i == t.dim() - 1 and t.shape[-1] != t.shape[-2]):
            shape[i] = now.tokens
    if table and t.size(-1) == was.tokens and t.dim() == 3:
        shape[-1] = t.size(-1)
    made = torch.randn(shape, dtype=torch.float64, generator=generator)
    if t.dtype == torch.bool:
        found = made > 0
        if found.dim():
            found[..., 0], found[..., 1] = first_key, not first_key
        return found
    if not t.is_floating_point():
        return torch.arange(shape[-1] if shape else 1).expand(shape).to(t.dtype).clone()
    if adds or (t.dim() == 4 and shape[-1] == now.tokens and shape[-2] in (1, now.tokens)):
        hidden = torch.rand(shape, generator=generator) < 0.3
        hidden[..., 0] = False
        return made.masked_fill(hidden, -torch.inf)
    return like_table(t, made)


def _adds(t: Tensor, tokens: int) -> bool:
    """Whether a tensor is a mask to be added to logits: nothing but zeros, or with entries that hide a key."""
    if not t.is_floating_point() or t.is_meta or t.dim() < 2 or t.numel() == 0:
        return False
    return t.size(-1) == t.size(-2) == tokens and bool((t <= HIDES).any() or (t == 0).all())

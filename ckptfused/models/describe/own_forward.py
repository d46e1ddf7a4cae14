"""Bytes that a layer's own forward saves for backward, counted on the meta device: nothing is computed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ckptfused.compat.kernels import replaced_kernels
from ckptfused.compat.pytree import tree_leaves
from ckptfused.compat.torch_memory import sparse_parts, storage_id
from ckptfused.simulate.functions import attention_on_meta, grouped_mm_on_meta
from ckptfused.simulate.meta_copy import without_data
from ckptfused.state.undone import without_trace

INDICES = ("layer_idx", "layer_id", "layer_index", "layer_number")  # by which a layer says where it stands


Places = tuple[tuple[str, str, int], ...]
"""Such numbers: the module's name within the layer, the attribute's, and the number."""


class IndexReadError(Exception):
    """A forward asks where its layer stands."""


def _read(*args: Any) -> Any:
    raise IndexReadError


_OPERATIONS = vars(int).keys() - {"__new__", "__getattribute__", "__doc__", "__sizeof__", "__getnewargs__"}
_Index: Any = type("_Index", (), dict.fromkeys([*_OPERATIONS, "__getattr__"], _read))
"""Stands for a number that nothing may depend on: every operation of an integer raises."""


def forget_places(layer: nn.Module) -> None:
    """Has a layer raise `IndexReadError` where its code asks where it stands."""
    for module in layer.modules():
        vars(module).update({index: _Index() for index in INDICES if type(vars(module).get(index)) is int})


# As on a GPU, where attention is a flash kernel's.
_KERNELS = {
    "aten::scaled_dot_product_attention": partial(attention_on_meta, "cuda", None),
    "aten::_grouped_mm": partial(grouped_mm_on_meta, None),
}


def saved_by_autograd(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], places: Places | None) -> int:
    """Bytes in unique storages that autograd saves in one call, parameters, buffers and inputs' own copies aside.

    **Shapes** `layer`, `args`, `kwargs`: on the meta device; x requires a gradient.
    Each storage counts once, as it is held once; x itself counts, since the call keeps it alive. Attention by
    `F.scaled_dot_product_attention` counts as a flash kernel's. Hooks of the layer itself, such as FSDP's, do not run.
    The forward runs, with all that it does to what it reaches; `without_trace` undoes that, or **raises**
    `RuntimeError` where it reaches an iterator or a queue.

    places: by what numbers the layer says where in the model it stands. None: it may not know, and where it asks,
    **raises** `IndexReadError`.
    """
    with in_training():
        layer, args, kwargs = without_data((layer, args, kwargs))
    if places is None:
        forget_places(layer)
    for name, index, number in places or ():
        vars(layer.get_submodule(name))[index] = number
    given = tree_leaves((args[1:], kwargs))
    owned = {storage(t) for t in (*layer.parameters(), *layer.buffers(), *given) if isinstance(t, Tensor)}
    found: dict[int, tuple[Any, int]] = {}

    def pack(t: Tensor) -> Tensor:
        if storage(t) not in owned:
            # The storage is held, so that no other takes its place.
            found[storage(t)] = (t.untyped_storage(), t.untyped_storage().nbytes())
        return t

    saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    with without_trace(layer, refuse=True), replaced_kernels(_KERNELS), in_training(), torch.device("meta"), saving:
        layer.forward(*args, **kwargs)
    return sum(size for _, size in found.values())


@contextlib.contextmanager
def in_training() -> Iterator[None]:
    """A context in which PyTorch's modes are those of a step, whatever they are where somebody asks for a count."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def storage(t: Tensor) -> int:
    """What tells one storage from another."""
    return storage_id(t)


def stored_bytes(values: Iterable[Any]) -> int:
    """Bytes of the unique storages of the tensors among these values, sparse ones included."""
    tensors = [t for t in values if isinstance(t, Tensor)]
    parts = chain(*(sparse_parts(t) if t.layout == torch.sparse_coo else (t,) for t in tensors))
    found = {storage(t): t.untyped_storage().nbytes() for t in parts}
    return sum(found.values())

"""Who watches or patches the modules that a fused layer does not call."""

from __future__ import annotations

from torch import nn

from ckptfused.compat.quantizers import changes_nothing
from ckptfused.compat.torch_distributed import is_flat_view
from ckptfused.compat.torch_modules import (
    forward_hooks,
    forward_pre_hooks,
    global_hooks,
    has_backward_hooks,
    has_hooks,
)
from ckptfused.compat.transformers import collects
from ckptfused.layer.parts import Reason
from ckptfused.layer.shards import is_fully_sharded
from ckptfused.layer.source import is_patched, is_replaced

EVERYWHERE = Reason("hooks on all modules")
LENT = Reason("tensors stand in for its weights (functional_call)", original=True)


def hooked(module: nn.Module) -> bool:
    """Whether somebody watches or patches a module.

    Hugging Face's own hooks, which stay once outputs were collected, count only while it collects: there the
    original forward runs (`convert.hugging_face.collecting`). Those that change nothing beside weights in few bits
    never count.
    """
    if not (has_hooks(module) or "forward" in vars(module)):
        return is_replaced(type(module))
    if has_backward_hooks(module) or is_patched(module) or is_replaced(type(module)):
        return True
    before, after = forward_pre_hooks(module).values(), forward_hooks(module).values()
    return not (all(map(changes_nothing, before)) and all(collects(hook) or changes_nothing(hook) for hook in after))


def watched(module: nn.Module, name: str = "") -> Reason | None:
    """Why a module that a fused layer does not call has to be called; None where it need not.

    name: by which the user knows it; "" for that of its class.
    """
    if not hooked(module):
        return None
    name = name or type(module).__name__
    if is_fully_sharded(module):
        name = name.removeprefix("FSDP")
        return Reason(f"{name} is sharded by itself (fully_shard inside the layer), so FSDP's hooks on it have to run")
    if is_replaced(type(module)):
        return Reason(f"{name}: the forward or __call__ of the class {type(module).__name__} was patched")
    return Reason(f"{name} has a hook or a forward of its own")


def hooked_everywhere() -> bool:
    """Whether somebody registered hooks for all modules. PyTorch's own tracker only watches which module runs."""
    return any(hook.__module__ != "torch.utils.module_tracker" for hook in global_hooks())


def lent_weights(layer: nn.Module, by_fsdp1: bool = False) -> bool:
    """Whether tensors stand in for parameters during this call, as `functional_call` does: a replay in backward would
    find the parameters again. FSDP1's views of its flat parameter are there then, if its own hooks have run: they count
    where asked for.
    """
    return any(
        weight is not None and not isinstance(weight, nn.Parameter) and (by_fsdp1 or not is_flat_view(weight))
        for module in layer.modules()
        for weight in module._parameters.values()
    )

"""What FSDP and PyTorch's checkpoint wrappers mark modules with, once they are imported: PyTorch 2.11 to 2.13."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ckptfused.compat.torch_modules import COMPILED_MODULE

WRAPPED = "_checkpoint_wrapped_module"
"""Where `checkpoint_wrapper` and `offload_wrapper` keep the module that they are around."""
WRAPPER_NAMES = (WRAPPED, "_fsdp_wrapped_module", COMPILED_MODULE)
"""What wrappers put into the names of parameters."""
COMPOSABLE_CHECKPOINT = "torch.distributed._composable.checkpoint_activation"
"""The module of `torch.distributed`'s checkpoint without a wrapper."""
_CONTRACT = "torch.distributed._composable.contract"
_MANAGED = "_is_fsdp_managed_module"


def fsdp1() -> Any:
    """`FullyShardedDataParallel`; None while nobody has imported it, which is slow, or somebody is about to."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)


def fsdp2() -> Any:
    """The class of modules that `fully_shard` was applied to; None likewise. `FSDPModule`."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)


def own_class(cls: Any) -> Any:
    """The class of a module before `fully_shard` derived another one of it."""
    sharded = fsdp2()
    if sharded is None or not issubclass(cls, sharded):
        return cls
    return next(base for base in cls.__mro__ if not issubclass(base, sharded))


def composable_names() -> tuple[str, ...]:
    """The attributes in which `fully_shard` and its like keep their own state of a module. `contract.STATE_KEY`."""
    contract: Any = sys.modules.get(_CONTRACT)
    return () if contract is None else (contract.STATE_KEY, contract.REGISTRY_KEY)


def is_managed(held: Mapping[str, Any]) -> bool:
    """Whether FSDP moves the parameters of the module with these attributes: it puts others in their place, FSDP1 also
    views of its flat ones, as attributes. `_is_fsdp_managed_module`."""
    return bool(held.get(_MANAGED))


def is_flat_view(t: Any) -> bool:
    """Whether a value is FSDP1's view of a flat parameter. `_is_flat_param`."""
    return isinstance(t, Tensor) and getattr(t._base, "_is_flat_param", False)


def is_partitioned(t: Tensor) -> bool:
    """Whether DeepSpeed (ZeRO-3) shards a parameter: it gives it other memory each time that it gathers it. `ds_id`."""
    return hasattr(t, "ds_id")


def checkpoint_wrappers() -> Any:
    """The module of `checkpoint_wrapper`; None while nobody has imported it. `algorithms._checkpoint`."""
    return sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")


def has_composable_checkpoint(module: nn.Module) -> bool:
    """Whether `torch.distributed._composable.checkpoint` was applied to a module. `contract.STATE_KEY`."""
    contract: Any = sys.modules.get(_CONTRACT)
    states = {} if contract is None else vars(module).get(contract.STATE_KEY, {})
    return any(getattr(state, "enable_hook", False) for state in states.values())

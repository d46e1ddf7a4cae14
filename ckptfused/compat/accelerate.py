"""Where accelerate keeps the forward that it puts its own around: 1.1 to 1.15."""

BELOW_HOOKS = "_old_forward"
"""Below the hooks of `dispatch_model`, which find it there at each call."""
BELOW_AUTOCAST = "_original_forward"
"""Below the autocast of `Accelerator.prepare`."""


def by_ddp() -> bool:
    """Whether accelerate puts `DistributedDataParallel` around models in this process. `AcceleratorState`."""
    from accelerate.state import AcceleratorState

    return AcceleratorState().distributed_type.startswith("MULTI_")

"""How long anything that runs on meta tensors would take on a device: an eager layer, checkpointed or not."""

from __future__ import annotations

from collections.abc import Callable

from ckptfused.cost import OpenLedger
from ckptfused.simulate.devices import Device
from ckptfused.simulate.functions import functions_for_meta
from ckptfused.simulate.roofline import Work


def step_seconds(step: Callable[[], object], device: Device) -> float:
    """Seconds of one call of `step`, which runs forward and backward on meta tensors, each op by `simulate.roofline`.

    Of a block of ckptfused's, `cost.block_seconds` says the same by what it is spent on.
    """
    opened, spent = OpenLedger(device.kind), [0.0]
    work = Work(device, opened)
    work.spend = spent.append
    with functions_for_meta(device.kind, work), opened, work:
        step()
    return sum(spent)

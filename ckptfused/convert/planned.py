"""A policy from a plan, of which all ranks have the same."""

from __future__ import annotations

from typing import Any

from torch import nn

from ckptfused.convert.policy import CheckpointPolicy
from ckptfused.policy.plan import plan

Found = tuple[CheckpointPolicy, tuple[str, ...]]


def planned(model: nn.Module, process_group: Any, **asked: Any) -> Found:
    """The policy of `plan(model, **asked)`, and what is to be said of it. With a process group a collective: the first
    rank plans for all.

    **Raises** what `plan` raises, on every rank.
    """
    if process_group is None:
        return _found(model, asked)
    import torch.distributed as dist

    group = None if process_group is True else process_group
    said: list[Found | Exception | None] = [None]
    if dist.get_rank(group) == 0:
        try:
            said[0] = _found(model, asked)
        except Exception as error:
            said[0] = error
    dist.broadcast_object_list(said, group=group, group_src=0)
    if isinstance(said[0], Exception):
        raise said[0]
    assert said[0] is not None
    return said[0]


def _found(model: nn.Module, asked: dict[str, Any]) -> Found:
    found = plan(model, **asked)
    line = (
        f"plan {found.policy.digest}: {found.peak:,} of {found.budget:,} bytes at the peak of a step, "
        f"{found.seconds:,.4f} s, predicted for {found.device}"
        + (f" and each of {found.shards} ranks" if found.shards > 1 else "")
    )
    return found.policy, (line, *found.notes)

"""Collectives: the first rank decides for all, and all ranks converted alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def of_first_rank(group: Any, find: Callable[[], T]) -> T:
    """What the first rank finds. group: None: this process alone; else a collective in it, of True the default one.

    **Raises** what `find` raises, on every rank.
    """
    if group is None:
        return find()
    import torch.distributed as dist

    group = None if group is True else group
    said: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            said[0] = find()
        except Exception as error:
            said[1] = error
    dist.broadcast_object_list(said, group=group, group_src=0)
    if said[1] is not None:
        raise said[1]
    found: T = said[0]
    return found


def agree(convert: Callable[[], T], said: Callable[[T], dict[str, str]], group: Any = None) -> T:
    """What `convert` gives on this rank, once what is `said` of it is the same on all. A collective, also where
    `convert` fails.

    **Raises** `ValueError` naming the rank that differs or failed; what `convert` raises.
    """
    import torch.distributed as dist

    failure: Exception | None = None
    try:
        made = convert()
        mine: Any = said(made)
    except Exception as error:
        failure, mine = error, f"{type(error).__name__}: {error}"
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    if failure is not None:
        raise failure
    for rank, theirs in enumerate(everyone):
        if isinstance(theirs, str):
            raise ValueError(f"convert: it failed on rank {rank}: {theirs}")
    for rank, theirs in enumerate(everyone):
        for name in {**everyone[0], **theirs}:
            first, other = everyone[0].get(name, "not converted"), theirs.get(name, "not converted")
            if first != other:
                raise ValueError(f"convert: ranks differ at {name}: rank 0 has {first}, rank {rank} has {other}")
    return made

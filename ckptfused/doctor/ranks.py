"""What the doctor asks of all processes that are joined, so that each takes the same steps."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

T = TypeVar("T")


def joined() -> bool:
    """Whether there are processes to agree with."""
    dist: Any = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """This process's place among those that are joined."""
    return int(torch.distributed.get_rank()) if joined() else 0


def everyones(mine: T) -> list[T]:
    """What each process says, by rank: a collective where processes are joined."""
    if not joined():
        return [mine]
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, mine)
    return found

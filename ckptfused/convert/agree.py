"""A collective that checks that all ranks converted alike."""

from __future__ import annotations

from typing import Any

from ckptfused.convert.report import Report


def check_agreement(report: Report, group: Any = None) -> None:
    """Compares this rank's report with the others'. A collective. **Raises** `ValueError` naming who differs."""
    import torch.distributed as dist

    mine = {x.name: f"{x.layer}: {x.path} by {x.family}, keep={report.keep!r}" for x in report.layers}
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    for rank, theirs in enumerate(everyone):
        for name in {**everyone[0], **theirs}:
            first, other = everyone[0].get(name, "not converted"), theirs.get(name, "not converted")
            if first != other:
                raise ValueError(f"convert: ranks differ at layer {name}: rank 0 has {first}, rank {rank} has {other}")

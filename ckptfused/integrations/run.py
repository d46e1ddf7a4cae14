"""What every callback does: convert as training begins, measure steps, say at the end what was saved."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset
from torch.utils.data import default_collate as collated

from ckptfused.convert import Report, convert, revert
from ckptfused.integrations.peak import PeakMeter
from ckptfused.simulate.meta_copy import bucket_bytes
from ckptfused.sizes import size
from ckptfused.spec.checks import check_flag, check_integer, nearest
from ckptfused.state.generators import undrawn

logger = logging.getLogger(__name__)
_BUCKETS = "_ckptfused_buckets"


class TrainingRun:
    """A model from the begin of its training to the end.

    every: steps from one measured one to the next. revert_before_saving: whether the model is as it was while it is
    saved, and after training. options: those of `ckptfused.convert`; **raises** `TypeError` for others.
    """

    def __init__(self, every: int, revert_before_saving: bool, options: dict[str, Any]) -> None:
        self.every = check_integer("every", every, 1)
        self.reverts = check_flag("revert_before_saving", revert_before_saving)
        known = inspect.signature(convert).parameters
        for name in options.keys() - known.keys():
            raise TypeError(f"{name}: expected an option of ckptfused.convert{nearest(name, known)}")
        self.options = {name: value for name, value in options.items() if value is not None}
        self.report: Report | None = None
        self.peaks: dict[int, int] = {}
        """Bytes at the peak of each step that was measured."""
        self._model: nn.Module | None = None
        self._meter: PeakMeter | None = None
        self._reverted = False
        self._buckets = 0
        self._first = self._step = 0
        """The step that is measured first, and the one that is measured now."""

    def begin(
        self,
        model: nn.Module,
        loader: Any = None,
        rows: int = 1,
        as_called: Callable[[Any], Any] = lambda batch: batch,
        replicated: bool = False,
        **step: Any,
    ) -> None:
        """Converts a model; a collective where several processes train.

        loader: where a batch comes from, of its first `rows`, if the options name a budget and no batch. as_called:
        from a batch to what the trainer calls the model with. replicated: a `DistributedDataParallel` is around the
        model, with its buckets. step: what the trainer knows of a step (`optimizer`, `autocast`,
        `gradient_accumulation_steps`), which options overrule.
        """
        self._buckets = bucket_bytes(model) if replicated else 0
        asked = self.options
        if "budget" in asked:
            asked = {**step, **asked}
            given = asked["batch"] if "batch" in asked else first_batch(loader, rows)
            asked["batch"] = as_called(given)
        if _ranks() > 1:
            asked = {"process_group": True, **asked}
        with _with_buckets(model, self._buckets):
            self.report, self._model, self._reverted = convert(model, **asked), model, False
        self.peaks.clear()
        _log(logging.INFO, f"training begins\n{self.report}")

    def step_begins(self, step: int, optimizer: torch.optim.Optimizer | None) -> None:
        """A step, from 1, or a batch of one; it is measured if its turn has come."""
        if not self.peaks:
            self._first = step
        if self._model is not None and (step % self.every == 0 or step == self._first):
            self._step, self._meter = step, PeakMeter(self._model, optimizer, self._buckets)

    def step_ends(self) -> None:
        """Compares the peak of a step that is measured, or of a batch of one, with the plan."""
        if self._meter is None:
            return
        peak, self._meter = self._meter.ends(), None
        if peak is None:
            return
        step = self._step
        self.peaks[step] = max(peak, self.peaks.get(step, 0))
        planned = None if self.report is None else self.report.peak
        if planned is None:
            _log(logging.INFO, f"step {step}: {size(peak)} at the peak")
            return
        level = logging.WARNING if peak > planned else logging.INFO
        share = f"{peak / planned:.0%} of the plan's {size(planned)}"
        more = ": plan for the longest batch (batch=...)" if peak > planned else ""
        _log(level, f"step {step}: {size(peak)} at the peak, {share}{more}")

    def saving_begins(self) -> None:
        """The model is about to be saved."""
        if self.reverts and self._model is not None and not self._reverted:
            revert(self._model)
            self._reverted = True

    def saving_ends(self) -> None:
        """Training goes on as it was planned."""
        if self._reverted and self._model is not None and self.report is not None:
            convert(self._model, policy=self.report.policy)
            self._reverted = False

    def end(self) -> str:
        """What was saved; it is logged, too. A collective of several processes: peaks become the largest rank's."""
        if self._meter is not None:  # a step that failed
            self._meter.ends()
        self.saving_begins()
        if _ranks() > 1 and self.report is not None:
            self.peaks = _largest(self.peaks)
        said = self.summary()
        _log(logging.INFO, said.removeprefix("ckptfused: "))
        self._model = self._meter = None
        return said

    def summary(self) -> str:
        """What the layers save for backward, now and before, and the largest peak that was measured."""
        if self.report is None:
            return "ckptfused: training has not begun"
        layers = self.report.layers
        counts = [(x.before, x.after) for x in layers if x.before is not None and x.after is not None]
        said = [f"ckptfused: {self.report.fused} of {len(layers)} layers fused"]
        if before := sum(count[0] for count in counts):
            after = sum(count[1] for count in counts)
            share = f"{after / before:.0%} of {before:,.0f}" if after <= before else f"{before:,.0f} before"
            said.append(f"they save {after:,.0f} bytes a token for backward, {share}")
        if self.peaks:
            step = max(self.peaks, key=self.peaks.__getitem__)
            planned = "" if self.report.peak is None else f", {size(self.report.peak)} planned"
            said.append(f"largest peak measured {size(self.peaks[step])}, in step {step}{planned}")
        return "; ".join(said)


class RunFigures:
    """The figures of a callback's run."""

    run: TrainingRun

    @property
    def report(self) -> Report | None:
        """The `Report` of `ckptfused.convert`; None before training."""
        return self.run.report

    @property
    def peaks(self) -> dict[int, int]:
        """Bytes at the peak of each step that was measured."""
        return self.run.peaks

    def summary(self) -> str:
        """What was saved, in a line."""
        return self.run.summary()


def first_batch(loader: Any, rows: int) -> Any:
    """The first rows of a loader's dataset as one batch; no sampler, iterator or generator is moved.

    **Raises** `ValueError` for a dataset that can only be iterated.
    """
    dataset = getattr(loader, "dataset", None)
    if dataset is None or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            "batch: pass batch= with budget=: of a dataset to iterate over no batch can be taken beforehand"
        )
    with undrawn():
        found = [dataset[i] for i in range(min(rows, len(dataset)))]
        batch = (getattr(loader, "collate_fn", None) or collated)(found)
    return dict(batch) if hasattr(batch, "keys") else batch


def plain_optimizer(optimizer: Any) -> torch.optim.Optimizer | None:
    """The optimizer that accelerate's or Lightning's is around; None if it is none of PyTorch's."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, torch.optim.Optimizer) else None


def _ranks() -> int:
    dist: Any = torch.distributed
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _log(level: int, said: str) -> None:
    """A message of the first rank's; a warning is any rank's, which it names."""
    rank = torch.distributed.get_rank() if _ranks() > 1 else 0
    if rank == 0 or level > logging.INFO:
        logger.log(level, "ckptfused: %s%s", f"rank {rank}, " if rank else "", said)


def _largest(peaks: dict[int, int]) -> dict[int, int]:
    """The peaks of each step on the rank where it was highest."""
    everyone: list[Any] = [None] * _ranks()
    torch.distributed.all_gather_object(everyone, peaks)
    return {step: max(theirs.get(step, 0) for theirs in everyone) for step in sorted(set().union(*everyone))}


@contextlib.contextmanager
def _with_buckets(model: nn.Module, size: int) -> Iterator[None]:
    """A model that a plan sees to hold the buckets of the `DistributedDataParallel` around it."""
    if not size:
        yield
        return
    model.register_buffer(_BUCKETS, torch.empty(size, dtype=torch.uint8, device="meta"), persistent=False)
    try:
        yield
    finally:
        delattr(model, _BUCKETS)

"""Blocks in segments that save one input each, and other modules between them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import TransformerEncoder, TransformerEncoderLayer

from ckptfused.checkpoint import checkpoint
from ckptfused.checks import transformed
from ckptfused.layer.call import learned
from ckptfused.layer.hooks import hooked
from ckptfused.layer.sdpa import same_sdpa, under_foreign_mode
from ckptfused.modules.attention import FusedCheckpointAttention
from ckptfused.modules.block import FusedCheckpointBlock
from ckptfused.modules.ffn import FusedCheckpointFFN
from ckptfused.modules.fused import FusedModule, check_call, refuse_generic
from ckptfused.modules.segment import run_segment
from ckptfused.offload import Offloader, saving
from ckptfused.ops import enclosing_checkpoint
from ckptfused.spec.checks import check_flag, check_integer

_FORWARDS = (FusedCheckpointBlock.forward, FusedCheckpointAttention.forward, FusedCheckpointFFN.forward)


class FusedCheckpointSequential(nn.Sequential):
    """An `nn.Sequential` whose fused blocks save one input for each of `segments` runs of them.

    Outputs, gradients and dropout masks are, bit for bit, those of the blocks called one by one (but for the
    order in which the gradients of a block that stands in a segment twice are summed). A block's
    `keep` says what the segment's backward keeps of it while it is replayed, so `keep="all"` costs no
    second rebuild and memory only for one segment at a time.
    Other modules, and blocks that cannot be fused just now, run as they are, each checkpointed by itself; the blocks
    before, between and behind them save one input each time. Other modules draw from PyTorch's default generator.

    With `offload` the input that a segment or another module saves is in host memory between forward and backward, as
    with `ckptfused.convert(model, offload=True)`; the last one's is not. A `FusedCheckpointSequential` inside has an
    `offload` of its own.

    `segments` is as equal in length as can be, and never more than there are modules: it stays as it is where modules
    come or go; a slice has its share of them, rounded up, a sum both, a product so many times.

    **Shapes** src and the masks as `FusedCheckpointBlock.forward`; all blocks get the same masks, and so do
    `nn.TransformerEncoderLayer` and `nn.TransformerEncoder`; other modules get x alone.
    **Saves** one input for each segment, 16 bytes for each block with dropout; one for each other module.
    **Recomputes** each block's forward but the segment's last, and what `keep` leaves out; other modules whole.
    **Raises** `TypeError` for what is no module, `ValueError` for a count of segments out of range.
    **Source** Chen et al. 2016 (arXiv 1604.06174), section 4; `torch.utils.checkpoint.checkpoint_sequential`.
    """

    _offloader: Offloader | None = None

    def __init__(self, *modules: Any, segments: int = 1, offload: bool = False) -> None:
        check_integer("segments", segments, 1)
        super().__init__(*modules)
        if len(self) and segments > len(self):
            raise ValueError(f"segments: expected 1 to {len(self)} (the number of modules), got {segments}")
        self.segments = segments
        self.offload = offload

    @property
    def offload(self) -> bool:
        """Whether saved inputs go to the host."""
        return self._offloader is not None

    @offload.setter
    def offload(self, offload: bool) -> None:
        self._offloader = Offloader() if check_flag("offload", offload) else None

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return super().__getitem__(index)
        part = OrderedDict(list(self._modules.items())[index])
        segments = -(-self.segments * len(part) // len(self)) if part else 1
        return type(self)(part, segments=segments, offload=self.offload)

    def __add__(self, other: Any) -> FusedCheckpointSequential:
        both = super().__add__(other)  # raises unless other is an nn.Sequential
        segments = self.segments + getattr(other, "segments", 1)
        offload = self.offload or getattr(other, "offload", False)
        return FusedCheckpointSequential(*both, segments=min(segments, len(both)) or 1, offload=offload)

    def __mul__(self, times: int) -> FusedCheckpointSequential:
        many = super().__mul__(times)
        return FusedCheckpointSequential(*many, segments=self.segments * times, offload=self.offload)

    def forward(  # type: ignore[override]
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        cu_seqlens: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The last module's output; arguments as `FusedCheckpointBlock.forward`."""
        only_fused: dict[str, Any] = {"cu_seqlens": cu_seqlens, "rotary": rotary, "generator": generator}
        check_call(src, src_mask, src_key_padding_mask, **only_fused)
        masks = (src_mask, src_key_padding_mask, is_causal)
        singly = src.is_nested or transformed() or learned(masks[:2], rotary or ()) is not None
        runs = self._runs(singly)
        x: Any = src
        for fused, run in runs:
            if not fused:
                with saving(None if isinstance(run[0], FusedCheckpointSequential) else self._offloader, x):
                    x = _call_one(run[0], x, masks, **only_fused)
                continue
            calls = [block.prepare(x, *masks, cu_seqlens=cu_seqlens, rotary=rotary) for block in run]
            with saving(self._offloader, x), enclosing_checkpoint.hidden_from_it(self, len(runs) == 1):
                y = run_segment(calls, generator)
            x = y.view(x.shape) if x.dim() == 2 else y
        return x

    def _runs(self, singly: bool) -> list[tuple[bool, list[Any]]]:
        """The modules in runs that are one segment (True), and those that are called by themselves."""
        modules, end = list(self), 0
        runs: list[tuple[bool, list[Any]]] = []
        for segment in range(self.segments):
            start, end = end, end + (len(modules) - end) // (self.segments - segment)
            first = len(runs)
            for module in modules[start:end]:
                fused = not singly and _fusable(module)
                if fused and len(runs) > first and runs[-1][0]:
                    runs[-1][1].append(module)
                else:
                    runs.append((fused, [module]))
        return runs

    def insert(self, index: int, module: nn.Module) -> FusedCheckpointSequential:
        """Inserts a module like `nn.Sequential.insert`, whose names are numbers: modules with other names keep them
        here.
        """
        names = list(self._modules)
        if names == [str(i) for i in range(len(names))] or not -len(names) <= index <= len(names):
            return super().insert(index, module)  # type: ignore[return-value]
        self.append(module)
        for name in names[index:] if index != len(names) else ():
            self._modules[name] = self._modules.pop(name)
        return self

    def extra_repr(self) -> str:
        alone = [(name, _why_alone(module)) for name, module in self.named_children()]
        said = ", ".join(f"{name} ({why})" for name, why in alone if why)
        offload = ", offload=True" if self.offload else ""
        return f"segments={self.segments}{offload}" + (f", not in a segment: {said}" if said else "")


def _fusable(module: Any) -> bool:
    """Whether a module can stand in a segment."""
    return _why_alone(module) is None


def _why_alone(module: Any) -> str | None:
    """Why a module cannot stand in a segment: it has no op; or somebody watches it, whom a segment does not call, or
    has it do something else."""
    if not isinstance(module, FusedModule):
        return f"{type(module).__name__} is no fused module"
    if hooked(module) or type(module).forward not in _FORWARDS:
        return "it has a hook or a forward of its own"
    return module.generic_reason()


def _call_one(module: Any, x: Any, masks: tuple[Any, ...], **only_fused: Any) -> Any:
    """A module's result by its own call, with those of the arguments that it takes."""
    if isinstance(module, FusedModule) and not module.takes_masks:
        return module(x, generator=only_fused["generator"])
    if isinstance(module, (FusedModule, FusedCheckpointSequential)):
        return module(x, *masks, **only_fused)
    attends = isinstance(module, (TransformerEncoderLayer, TransformerEncoder))
    if attends:
        refuse_generic(f"{type(module).__name__} does not take them", **only_fused)
    arguments = (x, *masks) if attends else (x,)
    converted = getattr(vars(module).get("forward"), "checkpoints", False)
    if converted or under_foreign_mode() or (isinstance(x, Tensor) and x.is_nested):
        return module(*arguments)
    return checkpoint(same_sdpa(module), *arguments)

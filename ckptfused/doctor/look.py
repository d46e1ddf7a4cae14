"""A model as the checks see it: its layers, and who checkpoints which of its modules."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ckptfused.compat.torch_distributed import WRAPPER_NAMES, checkpoint_wrappers, has_composable_checkpoint
from ckptfused.compat.transformers import checkpoint_of, is_checkpointing_layer
from ckptfused.doctor.regions import keywords_of
from ckptfused.models import find
from ckptfused.models.forward import ConvertedForward
from ckptfused.modules import FusedCheckpointSequential
from ckptfused.modules.fused import FusedModule
from ckptfused.profiler.step import TrainingStep
from ckptfused.state.fingerprints import leaves

OURS, WRAPPER, HUGGING_FACE, COMPOSABLE = (
    "ckptfused",
    "checkpoint_wrapper",
    "Hugging Face's gradient checkpointing",
    "torch.distributed's checkpoint",
)


@dataclass(frozen=True)
class Checkpoint:
    """A module that is checkpointed."""

    module: nn.Module
    by: str
    """One of `OURS`, `WRAPPER`, `HUGGING_FACE`, `COMPOSABLE`."""
    reentrant: bool = False
    preserves: bool = True
    """Whether random states are replayed."""
    active: bool = True
    """Whether it is at work in the module's present mode."""


@dataclass(frozen=True)
class Look:
    """What the checks are given."""

    model: nn.Module
    step: TrainingStep
    """Whose batch may be None."""
    names: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names.update({id(module): clean(name) for name, module in self.model.named_modules()})

    def name(self, of: nn.Module | str | None) -> str:
        """A module, or a parameter by its name, as a finding says it."""
        if isinstance(of, str):
            return clean(of)
        return self.names.get(id(of), "") or "the model"

    @functools.cached_property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """All that can be seen without running the model, the outer ones first."""
        return tuple(found for module in self.model.modules() for found in _checkpoints(module))

    @functools.cached_property
    def layers(self) -> list[nn.Module]:
        """The layers that `convert` would take."""
        return [layer for _, layer, _ in find.layers(self.model)]

    @functools.cached_property
    def length(self) -> int | None:
        """Tokens of a sequence of the batch; None where nothing says."""
        batch: Any = self.step.batch
        if batch is None:
            return None
        named = batch if isinstance(batch, Mapping) else {}
        first = next((named[n] for n in ("input_ids", "inputs_embeds") if isinstance(named.get(n), Tensor)), None)
        found = [first] if first is not None else [t for t in leaves(batch) if isinstance(t, Tensor)]
        return next((t.size(1) for t in found if t.dim() in (2, 3)), None)

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that require a gradient."""
        return [p for p in self.model.parameters() if p.requires_grad]


def clean(name: str) -> str:
    """A name without what wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_NAMES)


def _checkpoints(module: nn.Module) -> Iterator[Checkpoint]:
    wrappers = checkpoint_wrappers()
    if wrappers is not None and isinstance(module, wrappers.CheckpointWrapper):
        options = getattr(module.checkpoint_fn, "keywords", {})
        yield Checkpoint(module, WRAPPER, bool(options.get("use_reentrant")), options.get("preserve_rng_state", True))
    forward = vars(module).get("forward")
    if isinstance(forward, ConvertedForward) or isinstance(module, FusedModule | FusedCheckpointSequential):
        yield Checkpoint(module, OURS)
    if _flagged(module):
        options = keywords_of(checkpoint_of(module))
        reentrant = options.get("use_reentrant") is not False and "use_reentrant" in options
        yield Checkpoint(module, HUGGING_FACE, reentrant, options.get("preserve_rng_state", True), module.training)
    if has_composable_checkpoint(module):
        yield Checkpoint(module, COMPOSABLE)


def _flagged(module: nn.Module) -> bool:
    """Whether a layer of Hugging Face's is checkpointed by its own library."""
    return is_checkpointing_layer(module) and bool(module.gradient_checkpointing) and checkpoint_of(module) is not None

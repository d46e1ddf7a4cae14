"""Small random-weight models of every family, with a padded batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.versions import transformers

VOCABULARY = 97
Batch = dict[str, Tensor]
Sites = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Specimen:
    """One model. `make` takes the dropout probability at every site and an attention implementation."""

    name: str
    make: Callable[[float, str], nn.Module]
    batch: Callable[[], Batch]
    layers: Callable[[Any], list[nn.Module]]
    """The modules that `convert` should convert, in the order in which they run."""
    path: str | tuple[str, ...] = "fused"
    """What the report says of all layers, or of each."""
    implementations: tuple[str, ...] = ("sdpa", "eager")
    own_dropout: tuple[str, ...] = field(default=())
    """Dropout modules outside the layers, where PyTorch draws the masks: their p is set to 0."""
    zero: str | tuple[str, ...] = ()
    """How the names of biases end whose gradient is exactly 0: what is found there is rounding."""
    sites: Callable[[Any], Sites] | None = None
    """The dropout calls of a layer in order: which of its ops draws each, and at which site."""
    still: Callable[[Any], None] = lambda model: None
    """Switches dropout off where a checkpointed piece inside a layer draws from PyTorch."""
    since: tuple[int, int] = (0, 0)
    """The transformers from which on an adapter takes these layers. With an older one they are derived, or checkpointed
    as they are."""

    def paths(self, model: Any) -> tuple[str, ...]:
        """What an adapter makes of each layer of a model."""
        return self.path if isinstance(self.path, tuple) else (self.path,) * len(self.layers(model))

    def expects(self, model: Any, paths: tuple[str, ...]) -> bool:
        """Whether these paths of a model's layers are right, with the transformers that is installed."""
        if transformers() < self.since:
            return len(paths) == len(self.layers(model)) and {*paths} <= {"generic", "fused"}
        return paths == self.paths(model)


ZOO: dict[str, Specimen] = {}


def add(specimen: Specimen) -> None:
    """Makes a specimen known to the tests."""
    assert specimen.name not in ZOO
    ZOO[specimen.name] = specimen


def text_batch(batch: int = 3, length: int = 19, left: bool = False) -> Batch:
    """Token ids with one padded sequence in three, and labels that leave the padding out.

    With padding on the left, the first real token is no label: what predicts it sees nothing, which gives zeros
    here and in SDPA, but the mean of all values in eager attention.
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    if left:
        mask[1, :6] = 0
    else:
        mask[1, 12:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    if left:
        labels[1, 6] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def set_dropout(model: nn.Module, names: tuple[str, ...], p: float) -> None:
    """Sets the probability of named dropout modules."""
    for name in names:
        model.get_submodule(name).p = p  # type: ignore[assignment]


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights such that nothing vanishes: biases and norms are not left at 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() < 2:
                p.add_(torch.randn(p.shape, generator=generator).mul_(0.2).to(p.dtype))
            else:
                p.copy_(torch.randn(p.shape, generator=generator).mul_(p.size(-1) ** -0.5).to(p.dtype))
    return model

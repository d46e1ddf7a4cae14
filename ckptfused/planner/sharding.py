"""What a step costs each rank where FSDP2 shards the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from ckptfused.planner.step_costs import Costs
from ckptfused.profiler.marks import layers_of


def sharded(costs: Costs, model: nn.Module, shards: int) -> Costs:
    """Costs of a model each of whose layers, and the rest, is `fully_shard`ed over so many ranks.

    While a layer runs its parameters are whole, and those of the one that runs next are being gathered; in backward its
    gradients are whole, and those of the layer that ran before are being reduced. The rest of the model, embeddings and
    the head, is whole from begin to end, with its gradients. Gradients that are accumulated are divided, and whole ones
    come beside them. Each size that is divided is rounded up.
    """
    if shards == 1:
        return costs

    def share(size: int) -> int:
        return -(-size // shards)

    sizes = [_bytes(layer.parameters()) for _, layer in layers_of(model)]
    base = costs.base
    gradients = [layer.gradients for layer in base.layers]
    others = base.all_gradients - sum(gradients)
    total = _bytes(model.parameters())
    rest = total - sum(sizes)
    layers = []
    for place, layer in enumerate(costs.layers):
        own, later, earlier = sizes[place], (*sizes, 0)[place + 1], (0, *sizes)[place]
        forward, backward = own + later, own + earlier + share(gradients[place]) + (*gradients, 0)[place + 1]
        if base.accumulated:  # of which a step on one device does not hold all at a time
            backward += gradients[place] + others
        modes = tuple(mode.beside(forward, backward) for mode in layer.unit.modes)
        passing = layer.unit.passing
        assert passing is not None
        unit = layer.unit._replace(
            modes=modes, gradients=share(layer.unit.gradients), passing=passing._replace(peak=passing.peak + forward)
        )
        layers.append(layer._replace(unit=unit))
    divided = base.weights - total + share(total) + share(base.optimizer)
    least = divided + share(base.all_gradients) + share(base.optimizer_transient)
    return replace(costs, layers=tuple(layers), state=divided + rest + share(base.accumulated), least=least)


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.nbytes for p in parameters)

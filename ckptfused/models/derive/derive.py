"""From a layer and one of its calls to what it computes: proved at small shapes, then held to the shape at hand."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ckptfused.compat.pytree import tree_flatten, tree_map
from ckptfused.models.derive.attention import is_causal
from ckptfused.models.derive.copies import Sizes, without_data
from ckptfused.models.derive.prove import Proof, prove, same_shapes
from ckptfused.models.derive.record import Recording, held, record
from ckptfused.models.derive.recorder import Recorded, RefusedError, Value


class Derivation(NamedTuple):
    """What was found out about a layer as it is called: a proof, or why there is none."""

    proof: Proof | None
    why: str = ""
    call: Recorded | None = None
    """The first call that does not fit, where it is one call's fault."""
    calls: tuple[Recorded, ...] = ()
    """What was recorded at the first shape of the proof, as far as the result depends on it."""


def derive(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Derivation:
    """What a layer computes in this call, in its present mode and type. The layer itself does not run, nor change.

    **Raises** nothing: whatever cannot be read, proved, or followed from the proof to this shape is the reason.
    """
    try:
        proof = prove(layer, args, kwargs)
        hold(proof, layer, args, kwargs)
    except RefusedError as error:
        return Derivation(None, str(error), error.call, tuple(error.calls))
    except Exception as error:  # rules meet what nobody thought of: the layer then runs as it is
        return Derivation(None, f"it cannot be read ({type(error).__name__}: {error})")
    first = proof.recordings[0]
    return Derivation(proof, calls=tuple(first.before(first.y)))


def hold(proof: Proof, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Holds a proof to a call of any size: the same calls, sizes that follow from those of the proof, and a mask of the
    layer's own that is causal here too. **Raises** `RefusedError`.
    """
    args, kwargs = tree_map(lambda v: _without_data(v) if isinstance(v, Tensor) else v, (args, kwargs))
    here = record(without_data(layer), args, kwargs, wide=False)
    same_shapes(proof, here, Sizes(*here.x.shape[:2]))
    number, kind = proof.layout.own_mask
    if number >= 0:
        kept = [call.number for call in proof.recordings[0].before(proof.recordings[0].y)]
        mask = _matching(proof.recordings[0], here, kept.index(number))
        tokens = here.x.shape[1]
        if not is_causal(_evaluated(mask.values[0], dict(held(layer))), kind, tokens, tokens):
            raise RefusedError(f"its own mask is not the causal one at {tokens} tokens", mask)


def _without_data(t: Tensor) -> Tensor:
    return torch.empty_like(t, device="meta").requires_grad_(t.requires_grad)


def _matching(proved: Recording, here: Recording, index: int) -> Recorded:
    """The call of one recording that is that of the other; both have the same calls on which the result depends."""
    from_proof = proved.before(proved.y)
    same = [call for call in from_proof[: index + 1] if call.op == from_proof[index].op]
    place = from_proof[index].place
    nth = sum(call.place == place for call in same)
    matches = [call for call in here.before(here.y) if call.op == from_proof[index].op and call.place == place]
    return matches[nth - 1]


def _evaluated(value: Value, buffers: dict[str, Tensor]) -> Tensor:
    """A value that depends on buffers and numbers alone."""
    if value.call is None:
        return buffers[value.name.removeprefix("buffer:")].cpu()
    call = value.call

    def made(v: Any) -> Any:
        if isinstance(v, Value):
            return _evaluated(v, buffers)
        return torch.device("cpu") if isinstance(v, torch.device) or v == "meta" else v

    args, kwargs = tree_map(made, (call.args, call.kwargs))
    found = [t for t in tree_flatten(call.func(*args, **kwargs))[0] if isinstance(t, Tensor)]
    return found[value.index]

"""The adapter of a model family: where a layer keeps its pieces, how its forward is called, and the steps of a call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ckptfused.checks import autocast_enabled
from ckptfused.compat.torch_dispatch import is_traceable_wrapper_subclass
from ckptfused.cost.open_ledger import device_counted
from ckptfused.layer.call import build_call, learned
from ckptfused.layer.hooks import LENT, lent_weights
from ckptfused.layer.mask_patterns import by_place
from ckptfused.layer.parts import Inputs, Parts, Reason
from ckptfused.layer.projections import projection
from ckptfused.layer.source import class_as_read, class_name, unread, vouch
from ckptfused.layer.spec_text import Mode
from ckptfused.models.steps import Fused, Generic, Steps, inputs_made_again, joined_at_the_end, run_steps
from ckptfused.ops.call import Call
from ckptfused.spec import NORMS, BlockSpec
from ckptfused.spec.checks import check_choice

FAMILIES: dict[str, Family] = {}
EXAMPLE_TOKENS = 256
"""The length of the calls by which layers are judged."""


class Outcome(NamedTuple):
    """What will become of a layer's calls."""

    specs: tuple[BlockSpec, ...]
    """The fused ops that one call makes."""
    generic: int = 0
    """How many checkpointed pieces there are beside them, each of which saves its input."""
    reason: str = ""
    """Why there are such pieces."""
    made_again: int = 0
    """The number of ops and pieces whose input is made again, where a call allows it."""
    joined: bool = False
    """Whether the last op saves nothing, where a call allows it."""

    @classmethod
    def of(cls, steps: Sequence[Call | Generic], mode: Mode) -> Outcome:
        """What will become of a call that takes these steps."""
        specs = tuple(BlockSpec.parse(step.text) for step in steps if isinstance(step, Call))
        beside = [step.why for step in steps if isinstance(step, Generic) and not step.saves_nothing]
        again = inputs_made_again(steps) if mode.inputs_alone else 0
        joined = mode.inputs_alone and joined_at_the_end(steps) is not None
        return cls(specs, len(beside), "; ".join(dict.fromkeys(beside)), again, joined)

    @property
    def path(self) -> str:
        """The path that the call took, in the words of `LayerReport.path`."""
        return "part" if self.generic else "fused"


class Family:
    """One adapter. Subclasses say `layers` (class names), `parts` and `inputs`; `register` makes them known.

    Of a layer that is not one op, a subclass says `steps` in place of `inputs`, and `parts` has the halves that can be
    fused. Every step keeps the shape of x, so all ops are known before the first one runs: a layer of which one half
    turns out not to be fusable falls back whole.
    """

    name: str
    layers: tuple[str, ...] = ()
    """`module.Class` of every layer class that this adapter reads."""
    methods: tuple[str, ...] = ("forward",)
    """The methods of a layer that this adapter stands in for: their code has to be the code that was read."""

    def as_read(self, layer: Any) -> bool:
        """Whether a layer's class runs the code that this adapter was written from."""
        cls = type(layer)
        patched = any(method in vars(layer) for method in self.methods if method != "forward")
        return not patched and all(class_as_read(cls, getattr(cls, method)) for method in self.methods)

    def unread(self, layer: Any) -> Reason:
        """What `run` says of a layer that is not `as_read`."""
        cls = type(layer)
        what = next(filter(None, (unread(cls, getattr(cls, method)) for method in self.methods)), cls.__name__)
        return Reason(f"the code of {what} is not the one that was read (see tested versions)")

    def parts(self, layer: Any) -> Parts:
        """The pieces of a layer, as they are now."""
        raise NotImplementedError(f"family {self.name!r}: expected an adapter that defines parts(layer)")

    def inputs(self, layer: Any, *args: Any, **kwargs: Any) -> Inputs | Reason:
        """What the layer's forward was called with, or why this call is not fused. Signature as the forward's."""
        raise NotImplementedError(f"family {self.name!r}: expected an adapter that defines inputs(layer, …)")

    def steps(self, layer: Any, *args: Any, **kwargs: Any) -> Steps | Reason:
        """The steps of a call, one of them `Fused`, or why it is not fused. Signature as the layer's forward."""
        inputs = self.inputs(layer, *args, **kwargs)
        return inputs if isinstance(inputs, Reason) else (Fused(self.parts(layer), inputs),)

    def run(self, layer: Any, mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's result, or a `Reason`."""
        steps = self._calls(layer, mode, args, kwargs)
        return steps if isinstance(steps, Reason) else self.result(*run_steps(layer, mode, steps))

    def refuse_original(self, layer: Any, why: str) -> None:
        """**Raises** where the layer's own forward, which runs instead, would silently compute something else."""

    def result(self, y: Any, *rest: Any) -> Any:
        """What the layer's forward returns for the last x, and for what the checkpointed pieces returned beside."""
        return y

    def example(self, layer: Any, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with which the layer's forward takes x, for counting what it saves."""
        return (x,), {}

    def example_call(self, layer: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`example` of an x [1, EXAMPLE_TOKENS, C] as the layer takes it."""
        parts = self.parts(layer)
        module = parts.ffn.down if parts.ffn is not None else parts.attn.o  # type: ignore[union-attr]
        last = projection(module)
        if isinstance(last, Reason) or last.stored is not None:
            # A quantized weight has neither the width nor the type of what it stands for: vectors have the type of x.
            floats = sorted((p for p in layer.parameters() if p.is_floating_point()), key=Tensor.dim)
            weight = floats[0] if floats else torch.empty(0)
            width = getattr(module, "out_features", weight.size(-1))
        else:
            width, weight = last.out_features, last.weight
        x = torch.empty(1, EXAMPLE_TOKENS, width, dtype=weight.dtype, device=weight.device, requires_grad=True)
        return self.example(layer, x)

    def outcome(self, layer: Any, mode: Mode) -> Outcome | Reason:
        """What will become of calls like `example_call`."""
        try:
            args, kwargs = self.example_call(layer)
        except AttributeError as error:
            return lacking(error)
        steps = self._calls(layer, mode, args, kwargs, sharded=True)
        if isinstance(steps, Reason):
            return steps
        return Outcome.of(steps, mode)

    def _calls(
        self, layer: Any, mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any], sharded: bool = False
    ) -> list[Call | Generic] | Reason:
        """The steps, with an op call for each fused one. `sharded` as in `layer.build_call`."""
        if not self.as_read(layer):
            return self.unread(layer)
        try:
            steps = self.steps(layer, *args, **kwargs)
        except AttributeError as error:
            return lacking(error)
        if isinstance(steps, Reason):
            return steps
        if len(steps) > 1 and lent_weights(layer):
            return LENT
        calls: list[Call | Generic] = []
        for step in steps:
            made = fused_call(layer, *step, mode, sharded) if isinstance(step, Fused) else step
            if isinstance(made, Reason):
                return made
            calls.append(made)
        return calls


def fused_call(layer: Any, parts: Parts, inputs: Inputs, mode: Mode, sharded: bool = False) -> Call | Reason:
    """`layer.build_call`, for a layer whose own forward says what comes out."""
    x, masks = inputs.x, inputs.masks
    if (why := learned((masks.mask, masks.padding), (inputs.cos, inputs.sin, inputs.q_scale))) is not None:
        return why
    if (why := _closing_norm_fits(parts, x)) is not None:
        return why
    if type(x) is not Tensor and is_traceable_wrapper_subclass(x):
        return Reason(f"an input of type {type(x).__name__}")
    if parts.attn is not None and masks.mask is not None and not (inputs.windowed and parts.attn.window):
        inputs = inputs._replace(masks=by_place(masks, x.size(0 if inputs.seq_first else 1), layer))
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        inputs = inputs.savable()
    return build_call(parts, inputs, mode, sharded)


def _closing_norm_fits(parts: Parts, x: Tensor) -> Reason | None:
    """Autocast, but for the CPU's, gives the result of a LayerNorm in float32; a block's has the type of x."""
    if device_counted(x) == "cpu" or x.dtype not in (torch.bfloat16, torch.float16):
        return None
    closing = any(half is not None and half.out is not None for half in (parts.attn, parts.ffn))
    if closing and autocast_enabled(x):
        return Reason(f"autocast makes float32 of the layer's {x.dtype} input in its closing norm")
    return None


def lacking(error: AttributeError) -> Reason:
    """What is said of a layer in which another module was put where an adapter reads."""
    return Reason(f"another module than the one that was read: {error}")


def register(family: Family, reads: Iterable[type] = (), norms: Mapping[type, str] | None = None) -> Family:
    """Makes an adapter known to `convert`.

    reads: the layer class and the classes in `holders`, for an adapter of your own: their `forward`s as they are now
    are what the adapter was written from; changed or patched later, a layer is checkpointed generically.
    norms: your norm classes and what they compute ("layernorm", "rmsnorm", "gemma").

    **Raises** `ValueError` if the name is taken, for an unknown kind of norm, or where a class has no source to read.
    """
    if family.name in FAMILIES:
        raise ValueError(f"family {family.name!r}: choose another name, for this one is taken")
    for kind in (norms or {}).values():
        check_choice("norms", kind, NORMS[1:])
    vouch(reads, norms or {})
    FAMILIES[family.name] = family
    return family


def family_of(layer: nn.Module) -> Family | None:
    """The adapter that reads this class of layer, None if there is none."""
    name = class_name(type(layer))
    for family in FAMILIES.values():
        if name in family.layers:
            return family
    return None

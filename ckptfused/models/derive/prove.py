"""The proof: a layer's own forward against the block that was read, in float64, with every gradient and mask."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ckptfused.compat.pytree import tree_flatten, tree_map
from ckptfused.eager.from_op import plain_block
from ckptfused.layer.call import build_call, learned
from ckptfused.layer.parts import Reason
from ckptfused.layer.spec_text import Mode
from ckptfused.models.derive.copies import PLAIN_READING, Reading, TooManyError, wide
from ckptfused.models.derive.factors import Factored, UnfactoredError
from ckptfused.models.derive.normal_form import DerivedHalf, DerivedLayer, layout_of
from ckptfused.models.derive.read import Form, read
from ckptfused.models.derive.recording.evaluate import evaluated
from ckptfused.models.derive.recording.record import CHANGES, RAISED, Recording, record
from ckptfused.models.derive.recording.recorder import Recorded, RefusedError
from ckptfused.models.derive.resized import Sizes, resized_call
from ckptfused.models.derive.structure import same_structure, same_window
from ckptfused.models.derive.walk import Walk, close
from ckptfused.ops.call import Call
from ckptfused.spec import parse

SHAPES = (Sizes(2, 5), Sizes(3, 7))
MOST_VALUES = 2**19
"""Entries of x in a proof at the length of a call, where there is none at those of `SHAPES`."""
PROOF_ERROR = 1e-8
"""Error of a result or gradient relative to the largest value of it: rounding of float64 is some 1e-13, a constant that
is written with ten digits some 1e-10."""
_ATTENDS = ("scaled_dot_product_attention", "softmax")


class Proof(NamedTuple):
    """What was proved, with the recordings that it was proved of."""

    layout: DerivedLayer
    text: str
    recordings: tuple[Recording, ...]
    rules: dict[Recorded, str]
    """The rule that took each call of the first recording."""
    reading: Reading
    """The modules that were not followed."""
    errors: dict[str, float]
    """The largest relative error of the result and of every gradient, over all shapes."""
    tokens: int = 0
    """The one length of which it is, where the forward raises at another (CLIP's mask has one), or makes its tables
    anew (ESM-2's); 0: of every length."""


def prove(
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    seed: int = 0,
    placed: bool = True,
    reading: Reading = PLAIN_READING,
) -> Proof:
    """The normal form of a layer that is called so, proved at two shapes. reading: as in `copies.layer_copy`; of what
    stands beside the half that is fused, with these, it is proved that it can be called again.

    **Raises** `RefusedError` saying which call no rule takes, or where and by how much the two differ.
    """
    sizes = Sizes.of(args, kwargs, reading.streams)
    of = (layer, args, kwargs, seed, placed, reading)
    try:
        return _proved_with(*of, sizes.first)
    except RefusedError as error:
        if sizes.first:
            return _proved_with(*of, 0)  # what is alike may be no tables
        width = next(leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)).size(-1)
        if not str(error).startswith((RAISED, CHANGES)) or SHAPES[1].batch * sizes.tokens * width > MOST_VALUES:
            raise
        try:
            return _proved_with(*of, 0, sizes.tokens)
        except RefusedError as other:  # whose frames hold all its tensors, in circles
            other.__traceback__ = other.__cause__ = other.__context__ = None
            raise error from None


def _proved_with(
    layer: nn.Module, args: Any, kwargs: Any, seed: int, placed: bool, reading: Reading, first: int, alone: int = 0
) -> Proof:
    """alone: the length to prove it at; 0: those of `SHAPES`."""
    of = (layer, args, kwargs, seed, placed, reading, first, alone)
    try:
        return _proved(*of, dense=False)
    except UnfactoredError as error:
        try:
            return _proved(*of, dense=True)
        except TooManyError:
            raise error from None


def _proved(
    layer: nn.Module,
    args: Any,
    kwargs: Any,
    seed: int,
    placed: bool,
    reading: Reading,
    first: int,
    alone: int,
    dense: bool,
) -> Proof:
    generator = torch.Generator().manual_seed(seed)
    if not torch.is_grad_enabled():
        args, kwargs = tree_map(lambda v: v.detach() if isinstance(v, Tensor) else v, (args, kwargs))
    found: list[tuple[DerivedLayer, str, Recording]] = []
    rules: dict[Recorded, str] = {}
    errors: dict[str, float] = {}
    own = wide(layer, generator, placed, dense, reading)
    factored = Factored(own, generator)
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        for batch, tokens, _ in SHAPES:
            sizes = Sizes(batch, alone or tokens + first, first)
            recording, (form, walk) = _recorded(own, (args, kwargs), sizes, generator, factored, reading)
            layout, text, differing = _compared(own, form, walk, factored)
            found.append((layout, text, recording))
            rules = rules or walk.taken
            errors = {name: max(errors.get(name, 0.0), e) for name, e in differing.items()}
    layout, text, _ = max(found, key=lambda one: one[0].window)
    for one, _, recording in found:
        same = same_window(layout.window, one.window, recording.x.shape[1])
        if not same or _comparable(one._replace(window=layout.window)) != _comparable(layout):
            raise RefusedError("what it computes depends on the shape of x: " + " and ".join(t for _, t, _ in found))
    same_structure(found[0][2], found[1][2])
    return Proof(layout, text, tuple(recording for *_, recording in found), rules, reading, errors, alone)


def _comparable(layout: DerivedLayer) -> DerivedLayer:
    """A layout whose factors have no last digits, by which two shapes may differ."""

    def rounded(half: DerivedHalf | None) -> DerivedHalf | None:
        short = (float(f"{n:.12g}") if type(n) is float else n for n in (half.numbers if half else ()))
        return half and half._replace(numbers=tuple(short))

    return layout._replace(attn=rounded(layout.attn), ffn=rounded(layout.ffn))


def _recorded(
    own: nn.Module, call: Any, sizes: Sizes, generator: torch.Generator, factored: Factored, reading: Reading
) -> tuple[Recording, tuple[Form, Walk]]:
    given = (own, call, sizes, generator, factored, reading)
    try:
        return _recorded_with(*given, folded=False)
    except RefusedError as error:
        if str(error).startswith(RAISED):  # what [n, 1, T] means, or [B, T] where T = C, its forward says
            with suppress(RefusedError):
                return _recorded_with(*given, folded=True)
        raise


def _recorded_with(
    own: nn.Module, call: Any, sizes: Sizes, generator: Any, factored: Factored, reading: Reading, folded: bool
) -> tuple[Recording, tuple[Form, Walk]]:
    trouble: RefusedError | None = None
    for first_key in (True, False):
        given = resized_call(call[0], call[1], sizes, generator, first_key, folded, reading.streams)
        with factored:
            recording = record(own, *given, wide=True, generator=generator, **reading.of_record)
        if recording.y.data.isfinite().all():
            return recording, read(recording)
        trouble = RefusedError("its result is not finite", recording.y.call)
    assert trouble is not None
    raise trouble


def _compared(own: nn.Module, form: Form, walk: Walk, factored: Factored) -> tuple[DerivedLayer, str, dict[str, float]]:
    """The layout, the text of its block, and the relative errors. **Raises** `RefusedError` above the limit."""
    recording = walk.recording
    layout = layout_of(form, walk, own)
    x = recording.x.data
    with factored:  # a part of a product is rows of its weight
        inputs = layout.inputs(x, _made_again(layout, recording))
        parts = layout.parts(own)
    masks = inputs.masks
    if (why := learned((masks.mask, masks.padding), (inputs.cos, inputs.sin, inputs.q_scale))) is not None:
        attention = (one for one in recording.before(recording.y) if one.op in _ATTENDS)
        raise RefusedError(why.text, next(attention, None))
    call = build_call(parts, inputs, Mode())
    if isinstance(call, Reason):
        raise RefusedError(call.text)
    text, drawn = call.text, layout.masks(recording)
    wanted = [(name, leaf) for name, p in own.named_parameters() if p.requires_grad for leaf in factored.leaves(p)]
    y = recording.y.data
    if y.shape != x.shape:
        raise RefusedError(f"it makes {list(y.shape)} of {list(x.shape)}", recording.y.call)
    weights = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
    with factored:
        ways = [plain_block(x, call.slots, call.aux, text, drawn)]
    if not parse(text).has_dropout and not factored.matrices:
        ways.append(call.run())
    wanted += [
        (name, t) for name, t in recording.roots.items() if name.startswith("arg:") and t.requires_grad and t is not x
    ]
    leaves = [x, *(p for _, p in wanted)]
    own_gradients = _gradients(y, weights, leaves)
    _reaches_the_result(layout, [(name, g) for (name, _), g in zip(wanted, own_gradients[1:], strict=True)])
    errors: dict[str, float] = {}
    for made in ways:
        pairs = [("the result", y, made)]
        pairs += zip(("the gradient of x", *(f"the gradient of {name}" for name, _ in wanted)), own_gradients,
                     _gradients(made, weights, leaves), strict=True)  # fmt: skip
        # The gradient of a bias of k, say, is zero but for rounding: it is compared with the largest of all.
        least = 1e-3 * max(float(a.detach().abs().max()) for _, a, _ in pairs[1:] if a.numel())
        for name, a, b in pairs:
            a, b = a.detach(), b.detach()
            error = float((a - b).abs().max()) / max(float(a.abs().max()), least) if a.numel() else 0.0
            if not error <= PROOF_ERROR:
                raise RefusedError(f"{name} differs by {error:.1e} of its largest value from what was read ({text})")
            errors[name] = max(errors.get(name, 0.0), error)
    if recording.rest is not None:
        _can_be_called_again(recording, factored)
    return layout, text, errors


def _reaches_the_result(layout: DerivedLayer, gradients: list[tuple[str, Tensor]]) -> None:
    """**Raises** `RefusedError` where nothing of a half does, which a number or what is drawn leaves out: nothing could
    be proved of it.
    """
    for half, last in ((layout.attn, 3), (layout.ffn, 2)):
        made = half and half.maps[last]
        if made and not any(bool(g.any()) for name, g in gradients if name == made.weight):
            raise RefusedError(f"nothing that {made.weight} makes reaches the result at the proof's numbers")


def _made_again(layout: DerivedLayer, recording: Recording) -> dict[str, Tensor]:
    """What a block takes from outside, by name: vectors and coefficients as a call will make them."""
    names = {t.name for one in layout.vectors for t in one.made_of if t is not None and t.name.startswith("call:")}
    known = recording.drawn()
    outer = dict(recording.roots)
    for name in names:
        number, index = map(int, name.removeprefix("call:").split("."))
        value = recording.calls[number].values[index]
        outer[name] = evaluated(value, recording.roots.__getitem__, value.data.device, known)
    return outer


def _can_be_called_again(recording: Recording, factored: Factored) -> None:
    """**Raises** `RefusedError` where what stands beside the fused half is not what its calls make of its start."""
    assert recording.rest is not None
    start, end = recording.rest.start, recording.rest.end
    with factored:
        again = evaluated(end, recording.roots.__getitem__, start.data.device, {**recording.drawn(), start: start.data})
    weights = torch.randn(end.shape, dtype=end.data.dtype, generator=torch.Generator().manual_seed(2))
    x = start if recording.rest.first else recording.x
    gradients = [_gradients(made, weights, [x.data])[0] for made in (end.data, again)]
    if not close(end.data.detach(), again.detach()) or not close(*gradients):
        raise RefusedError("what stands beside the half is another thing when it is called again", end.call)


def _gradients(y: Tensor, weights: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(y, leaves, weights, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]


def leaves_of(args: Any, kwargs: Any) -> dict[str, Tensor]:
    """The tensors of a call by the names that a recording gives them."""
    leaves = tree_flatten((args, kwargs))[0]
    return {f"arg:{i}": leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}


def proved_call(
    layout: DerivedLayer, layer: nn.Module, x: Tensor, outer: dict[str, Tensor], mode: Mode
) -> Call | Reason:
    """The op call of a layer with a proved layout."""
    return build_call(layout.parts(layer), layout.inputs(x, outer), mode)

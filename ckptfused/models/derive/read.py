"""The reading of a recording: residual sums, their branches, and the normal form that these make."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from ckptfused.models.derive.recording.record import Recording
from ckptfused.models.derive.recording.recorder import Recorded, RefusedError, Value
from ckptfused.models.derive.rules.activations import Hidden, hidden
from ckptfused.models.derive.rules.attention import core
from ckptfused.models.derive.rules.core import Core
from ckptfused.models.derive.rules.heads import Heads, heads
from ckptfused.models.derive.rules.output_gate import Attended, OutputGate, attended, output_gate
from ckptfused.models.derive.rules.pieces import Linear, NormPiece, layer_scale, linear, norm, side_by_side
from ckptfused.models.derive.rules.sums import FACTORS, additions, factor_of, is_sum, stream, terms_of, unscaled
from ckptfused.models.derive.walk import Walk, arranges, products_in_parts


class Branch(NamedTuple):
    """What one half adds to the residual stream."""

    source: Value
    """What it reads, before its norm."""
    pre: NormPiece | None
    normed: Value
    """What its first projections take."""
    post: NormPiece | None
    last: Linear
    m: float
    dropped: Recorded | None
    """The dropout of what it adds."""
    residual: bool = True
    """Whether what it reads is added to it."""
    core: Core | None = None
    heads: Heads | None = None
    gate: OutputGate | None = None
    hidden: Hidden | None = None
    hidden_dropped: Recorded | None = None


class Form(NamedTuple):
    """A layer in normal form."""

    attn: Branch | None
    ffn: Branch | None
    attn_out: NormPiece | None
    ffn_out: NormPiece | None
    parallel: bool | Literal["shared"]


@torch.no_grad()
def read(recording: Recording) -> tuple[Form, Walk]:
    """The normal form of a layer. **Raises** `RefusedError` naming the first call that no rule takes."""
    walk = Walk(recording)
    try:
        form, walk = _formed(walk)
        for v in recording.beside:
            if form.attn is None or walk.through(v) not in form.attn.core.weights:  # type: ignore[union-attr]
                raise RefusedError("the layer returns a tensor beside its result, not attention's weights", v.call)
        for call in recording.before(recording.y, *recording.beside, since=recording.x):
            if call not in walk.taken:
                raise RefusedError(f"no rule takes {call}", call)
    except RefusedError as error:
        error.calls = recording.before(recording.y, *recording.beside)
        raise
    return form, walk


def _formed(walk: Walk) -> tuple[Form, Walk]:
    """The form, whether or not both halves take parts of one product (timm's parallel block, Flux 2)."""
    try:
        return _form(walk), walk
    except RefusedError:
        for product in products_in_parts(walk.recording):
            other = Walk(walk.recording, product)
            if (form := other.attempt(_form, other)) is not None:
                return form, other
        raise


def _form(walk: Walk) -> Form:
    x = walk.recording.x
    if x.data.dim() != 3:
        raise RefusedError(f"x has shape {list(x.shape)}, expected [B, T, C]")
    stages: list[tuple[list[Branch], NormPiece | None]] = []
    at = walk.through(walk.recording.y)
    while at is not x:
        if len(stages) == 2:
            raise RefusedError(f"no rule takes {at}", at.call)
        branches, out, at = _stage(walk, at)
        stages.insert(0, (branches, out))
    if len(stages) == 1 and len(stages[0][0]) == 2:
        return _parallel(walk, *stages[0])
    if any(len(branches) != 1 for branches, _ in stages) or not stages:
        raise RefusedError("the layer adds nothing to its input, or more than two things")
    halves = [(branches[0], out) for branches, out in stages]
    kinds = ["attn" if half.core is not None else "ffn" for half, _ in halves]
    if kinds not in (["attn", "ffn"], ["attn"], ["ffn"]):
        raise RefusedError(f"halves in the order {' and '.join(kinds)}", halves[0][0].last.y.call)
    found = dict(zip(kinds, halves, strict=True))
    attn, attn_out = found.get("attn", (None, None))
    ffn, ffn_out = found.get("ffn", (None, None))
    return Form(attn, ffn, attn_out, ffn_out, False)


def _parallel(walk: Walk, branches: list[Branch], out: NormPiece | None) -> Form:
    attn = next((b for b in branches if b.core is not None), None)
    ffn = next((b for b in branches if b.core is None), None)
    if attn is None or ffn is None or out is not None:
        raise RefusedError("two halves of one kind beside each other, or a norm of their sum", walk.recording.y.call)
    shared = attn.pre is not None and attn.normed is ffn.normed
    return Form(attn, ffn._replace(pre=None) if shared else ffn, None, None, "shared" if shared else True)


def _stage(walk: Walk, y: Value) -> tuple[list[Branch], NormPiece | None, Value]:
    """One sum of the residual stream: its branches, its closing norm, and the stream before it."""
    out, of_sum, of_stream = walk.attempt(norm, walk, y), 1.0, 1.0
    whole = y if out is None else walk.through(out.x)
    y, of_sum = (y, 1.0) if out is None else unscaled(walk, whole)
    if y.call is None or y.op not in ("add", "radd"):
        return [_alone(walk, whole)], out, walk.recording.x
    terms = terms_of(walk, y)
    branches: list[Branch] = []
    streams: list[Value] = []
    trouble: RefusedError | None = None
    for term in terms:
        if (found := walk.attempt(stream, walk, term, out is not None)) is not None:
            at, of_stream = found
            streams.append(at)
            continue
        try:
            with walk.trial():
                branches += _branches(walk, term)
        except RefusedError as error:
            trouble = error if trouble is None or trouble.call is None else trouble
    if trouble is not None:
        raise trouble
    if len(streams) != 1:
        raise RefusedError(f"a sum of {len(terms)} values, {len(streams)} of which are the residual stream", y.call)
    # The closing norm of the sum before is the stream itself, not a norm of this half.
    branches = [b._replace(pre=None, source=b.normed) if b.normed is streams[0] else b for b in branches]
    if out is not None and of_sum * of_stream != 1:
        # norm(c (a x + f), eps) = norm(x + f / a, eps / (c a)²), where c a > 0 (DeepNorm).
        if out.eps is None or of_sum * of_stream <= 0:
            raise RefusedError(f"a sum times {of_sum * of_stream} before its norm", y.call)
        out = out._replace(eps=out.eps / (of_sum * of_stream) ** 2)
        branches = [branch._replace(m=branch.m / of_stream) for branch in branches]
    sources = {id(branch.source) for branch in branches}
    if len(branches) > 1 and sources != {id(streams[0])} and of_stream == 1:
        return _serial(walk, y, branches, streams[0], out)
    for branch in branches:
        if branch.source is not streams[0] and branch.pre is None:
            raise RefusedError(f"no rule takes {branch.normed}", branch.normed.call)
    if any(branch.source is not streams[0] for branch in branches):
        raise RefusedError("a half reads another value than the one that it is added to", y.call)
    for call in additions(walk, y, terms):
        walk.take(call, "residual")
    return branches, out, streams[0]


def _alone(walk: Walk, y: Value) -> Branch:
    """A half to whose result what it reads is not added: attention or an MLP by itself."""
    branch, *others = _branches(walk, y)
    if others:
        raise RefusedError("two halves to which what they read is not added", y.call)
    if branch.source is not walk.recording.x:
        raise RefusedError(f"no rule takes {branch.source}", branch.source.call)
    return branch._replace(residual=False)


def _serial(
    walk: Walk, y: Value, branches: list[Branch], stream: Value, out: NormPiece | None
) -> tuple[list[Branch], NormPiece | None, Value]:
    """The last of several branches, which reads the sum of the stream and the earlier ones."""
    whole = additions(walk, y, terms_of(walk, y))
    for last in branches:
        if last.source.op in ("add", "radd"):
            terms = terms_of(walk, last.source)
            calls = additions(walk, last.source, terms)
            if len(terms) == len(branches) and {*whole} - {*calls} == {y.call} and len(calls) + 1 == len(whole):
                walk.take(y.call, "residual")
                return [last], out, last.source
    for branch in branches:
        if branch.source is not stream and branch.pre is None and not is_sum(walk, branch.source):
            raise RefusedError(f"no rule takes {branch.source}", branch.source.call)
    raise RefusedError("halves that are neither one after the other nor beside each other", y.call)


def _branches(walk: Walk, term: Value) -> list[Branch]:
    """What a term of a sum adds: one half, or two of which one product is the last (PaLM, Flux)."""
    m, post, dropped = 1.0, None, None
    v = walk.same(term)
    while True:
        if v.call is None:
            raise RefusedError("a sum of what the layer is given")
        call = v.call
        if dropped is None and v.op == "dropout" and call.mask is not None:
            dropped = call
            walk.take(call, "residual dropout")
            v = walk.same(call.inputs[0])
        elif v.op in FACTORS and len(call.inputs) == 1 and (post is None or post.kind == "layerscale"):
            m *= factor_of(v)
            walk.take(call, "residual multiplier")
            v = walk.same(call.inputs[0])
        elif (last := walk.attempt(linear, walk, v)) is not None:
            break
        elif post is None and (found := walk.attempt(norm, walk, v)) is not None:
            post = found
            v = walk.same(found.x)
        elif (scaled := walk.attempt(layer_scale, walk, v)) is not None and (both := _scaled_by(post, scaled)):
            post = both
            v = walk.same(scaled.x)
        elif arranges(v):
            walk.take(call, "layout")
            v = walk.same(call.inputs[0])
        else:
            raise RefusedError(f"no rule takes {call}", call)
    branch = Branch(v, None, v, post, last, m, dropped)
    parts = side_by_side(walk, last)
    if len(parts) > 1 and (dropped is not None or (post is not None and post.kind != "layerscale")):
        raise RefusedError("dropout or a norm of what two halves add together", v.call)
    return [_half(walk, branch._replace(last=part)) for part in parts]


def _half(walk: Walk, branch: Branch) -> Branch:
    inner = walk.same(branch.last.x)
    at = attended(walk, inner)
    return _ffn(walk, branch, inner) if at is None else _attention(walk, branch, inner, at)


def _scaled_by(post: NormPiece | None, inner: NormPiece) -> NormPiece | None:
    """What multiplies by both; None where one half cannot."""
    if post is None or post.kind != "layerscale":
        return inner if post is None else None
    if post.factor or inner.factor or (post.weight and inner.weight) or (post.gain and inner.gain):
        return None
    return inner._replace(weight=post.weight or inner.weight, gain=post.gain or inner.gain)


def _attention(walk: Walk, branch: Branch, inner: Value, at: Attended) -> Branch:
    found = core(walk, at.end)
    gate = output_gate(walk, inner, at, found)
    made = heads(walk, found, gate.made.y if gate is not None and gate.in_q else None)
    sides = [side for side in (made.q, made.k, made.v, gate and gate.made) if side is not None]
    return _entered(walk, branch._replace(core=found, heads=made, gate=gate), sides)


def _ffn(walk: Walk, branch: Branch, inner: Value) -> Branch:
    h = walk.through(inner)
    dropped = None
    if h.op == "dropout" and h.call is not None and h.call.mask is not None:
        dropped = h.call
        walk.take(dropped, "hidden dropout")
        h = walk.through(h.call.inputs[0])
    made = hidden(walk, h)
    sides = [side for side in (made.first, made.up) if side is not None]
    return _entered(walk, branch._replace(hidden=made, hidden_dropped=dropped), sides)


def _entered(walk: Walk, branch: Branch, sides: list[Linear]) -> Branch:
    """A branch with what its first projections read, and the norm before it."""
    taken = [walk.through(side.x) for side in sides]
    if any(v is not taken[0] for v in taken):
        raise RefusedError("projections of one half read different values", sides[-1].y.call)
    pre = walk.attempt(norm, walk, taken[0])
    source = taken[0] if pre is None else walk.through(pre.x)
    return branch._replace(source=source, pre=pre, normed=taken[0])

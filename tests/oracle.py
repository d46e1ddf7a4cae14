"""Inputs for a case, the ways to run it (fused, eager PyTorch, float64 truth) and the comparison between them."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ckptfused.eager import block as reference_module
from ckptfused.eager import dropout_masks, eager_block
from ckptfused.eager.activation import FUNCTIONS
from ckptfused.eager.attention import probabilities, sink_logits
from ckptfused.eager.dropout import dropout
from ckptfused.spec import BIASED_NORMS, COEFFICIENTS, COEFFICIENTS_SLOT, BlockSpec, param_shapes
from tests.cases import Case

SEED = 2024  # of the dropout masks

attention_module = importlib.import_module("ckptfused.eager.attention")  # the package has a function of that name


@dataclass(frozen=True)
class Inputs:
    """What a block is called with, and the gradient that comes back into it."""

    x: Tensor
    params: dict[str, Tensor]
    aux: dict[str, Tensor]
    dy: Tensor

    def to(self, dtype: torch.dtype, device: torch.device | str | None = None) -> Inputs:
        """Every floating tensor in another type; every tensor on another device, if one is given."""

        def cast(t: Tensor) -> Tensor:
            return t.to(device, dtype if t.is_floating_point() else None)

        params = {name: cast(t) for name, t in self.params.items()}
        return Inputs(cast(self.x), params, {name: cast(t) for name, t in self.aux.items()}, cast(self.dy))

    def tensors(self) -> dict[str, Tensor]:
        return {"x": self.x, **self.params, **{f"aux.{k}": t for k, t in self.aux.items()}, "dy": self.dy}

    def clone(self) -> Inputs:
        """The same values in memory of their own."""
        params = {name: t.detach().clone() for name, t in self.params.items()}
        aux = {name: t.clone() for name, t in self.aux.items()}
        return Inputs(self.x.detach().clone(), params, aux, self.dy.clone())


def _normal(shape: Iterable[int], std: float, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator) * std


def make_params(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    """Parameters of every slot that the case has, float64, of the size a trained model has."""
    spec, c = case.spec(), case.width
    params: dict[str, Tensor] = {}

    def linear(name: str, out: int, into: int, bias: bool) -> None:
        shape = (into, out) if case.transposed else (out, into)
        params[f"{name}_w"] = _normal(shape, into**-0.5, generator)
        if bias:
            params[f"{name}_b"] = _normal((out,), 0.2, generator)

    def norm(name: str, kind: str, width: int) -> None:
        if kind == "none":
            return
        modulated = case.modulated and name.endswith(("pre", "post"))
        shape = (case.batch, width) if modulated else (width,)
        params[f"{name}_w"] = _normal(shape, 0.2, generator) + (kind not in ("gemma", "layernorm1p"))
        if (kind in BIASED_NORMS or (modulated and kind != "layerscale")) and case.norm != "layernorm-nobias":
            params[f"{name}_b"] = _normal(shape, 0.2, generator)

    biased, qkv_biased = case.bias == "all", case.bias != "none"
    if (attn := spec.attn) is not None:
        norm("attn.pre", attn.pre, c)
        if attn.joint:
            linear("attn.q", attn.joint_width, c, qkv_biased)
        else:
            for name in "qkv":
                linear(f"attn.{name}", attn.products(c)[name][1], c, qkv_biased)
        if "gate" in attn.products(c):
            linear("attn.gate", attn.gate_width, c, qkv_biased)
        for name in ("q_norm", "k_norm"):
            norm(f"attn.{name}", attn.qk_norm, attn.normed_width(name))
        linear("attn.o", c, attn.q_width, biased)
        norm("attn.post", attn.post, c)
        norm("attn.out", attn.out, c)
        if attn.sinks:
            params["attn.sinks"] = _normal((attn.heads,), 1.0, generator)
    if (ffn := spec.ffn) is not None:
        norm("ffn.pre", ffn.pre, c)
        if ffn.joint:
            linear("ffn.gate", ffn.gu_width, c, biased)
        else:
            for name in ("gate", "up") if ffn.gated else ("up",):
                linear(f"ffn.{name}", ffn.hidden, c, biased)
        linear("ffn.down", c, ffn.hidden, biased)
        norm("ffn.post", ffn.post, c)
        norm("ffn.out", ffn.out, c)
        if ffn.act in COEFFICIENTS:  # above 0 and below eps, xIELU is smooth
            params[COEFFICIENTS_SLOT] = torch.tensor([0.8, 1.1, 0.5, -1e-3]) * _normal((4,), 0.1, generator).exp()
    for name, (shape, _) in param_shapes(spec, c).items():
        if ".lora" in name and (not name.endswith("bias") or case.bias == "all"):
            params[name] = _normal(shape, shape[-1] ** -0.5, generator)
    return params


def make_aux(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    """RoPE tables, masks and sequence bounds; masks leave some rows without any key."""
    spec = case.spec()
    aux: dict[str, Tensor] = {}
    if spec.attn is None:
        return aux
    b, t, h = case.batch, case.tokens, spec.attn.heads
    if spec.attn.rope != "none":
        pairs = spec.attn.rotary // 2
        position = torch.arange(t, dtype=torch.float64)
        if case.rope.endswith("batch"):
            position = position + 3 * torch.arange(b)[:, None]
        angle = position[..., None] * 10.0 ** -torch.linspace(0, 2, pairs, dtype=torch.float64)
        if case.rope == "half-wide":
            angle = torch.cat((angle, angle), -1)
        elif case.rope == "interleaved-batch":
            angle = angle.repeat_interleave(2, -1)
        aux |= {"cos": angle.cos(), "sin": angle.sin()}

    def drop_some(*shape: int) -> Tensor:
        dropped = torch.rand(*shape, generator=generator) < 0.3
        dropped[..., t // 2, :] = True
        return dropped

    mask_kind, padding_kind = case.mask_kinds()
    if case.mask == "keep4d":
        aux["mask"] = ~drop_some(b, h, t, t)
    elif mask_kind == "keep":
        aux["mask"] = ~drop_some(b, 1, t, t)
    elif mask_kind == "drop":
        aux["mask"] = drop_some(1, 1, t, t).expand(b, h, t, t)
    elif mask_kind == "add":
        shape = (1, 1, t, t) if case.mask == "add2d" else (b, h, t, t)
        aux["mask"] = _normal(shape, 1.0, generator)
        if case.mask == "add2d":
            aux["mask"].masked_fill_(drop_some(*shape), -torch.inf)
    if padding_kind != "none":
        lengths = torch.tensor([t, t - t // 3, t // 2])[:b]
        real = torch.arange(t) < lengths[:, None]
        added = torch.where(real, _normal((b, t), 1.0, generator), -torch.inf)
        aux["padding"] = {"keep": real, "drop": ~real, "add": added}[padding_kind]
    if case.q_scale != "none":
        aux["q_scale"] = 1 + _normal((t,) if case.q_scale == "tokens" else (b, t), 0.3, generator)
    if case.packed:
        bounds = sorted({0, 1, t // 4, t - t // 3, t})
        aux["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32 if case.tokens == 67 else torch.int64)
    return aux


def make_inputs(case: Case, dtype: torch.dtype = torch.float64, seed: int = 0, device: str = "cpu") -> Inputs:
    """The case's tensors: drawn in float64, then rounded to dtype, so that every run sees the rounded values.

    Drawn on the CPU, whatever the device: all devices see the same numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (case.tokens, case.batch, case.width) if case.seq_first else (case.batch, case.tokens, case.width)
    x = _normal(shape, 1.0, generator)
    inputs = Inputs(x, make_params(case, generator), make_aux(case, generator), _normal(shape, 1.0, generator))
    made = inputs.to(dtype, device)
    if dtype.itemsize == 2 and case.lora in ("twice", "float32"):
        made.params.update({n: t.float().to(device) for n, t in inputs.params.items() if ".lora" in n})
    return made


def generator(device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(SEED)


def rng_state(like: Tensor) -> Tensor:
    """The state that a block called with ``generator=generator(device)`` draws."""
    from ckptfused import rng

    return rng.state(like, generator(like.device))


def _op_mask(shape: Sequence[int], p: float, seed: int, offset: int, site: int) -> Tensor:
    from ckptfused import rng

    return rng.dropout_mask(shape, p, torch.tensor([seed, offset]), site)


def masks_of(spec: BlockSpec, inputs: Inputs, state: Tensor | None, slow: bool = True) -> dict[int, Tensor]:
    """The keep mask of every site that drops something, by site number, on the inputs' device.

    On the CPU by the slow Philox. For other devices, and where that takes too long, by the CPU's op, which test_rng
    holds to it: that takes less time, and every mask is still one that the device had no part in.
    """
    x = inputs.x.transpose(0, 1) if spec.seq_first else inputs.x
    by_op = mock.patch.object(reference_module, "philox_mask", _op_mask)
    with contextlib.nullcontext() if x.is_cpu and slow else by_op:
        masks = dropout_masks(spec, *x.shape, state, inputs.aux.get("cu_seqlens"))
    return {site: mask.to(x.device) for site, mask in masks.items()}


Function = Callable[[Inputs], Tensor]


def fused(spec: BlockSpec) -> Function:
    """The block under test: block, attention_block or ffn_block."""
    from ckptfused import functional

    if spec.attn is None:
        return lambda i: functional.ffn_block(i.x, i.params, spec, generator=generator(i.x.device))
    call = functional.attention_block if spec.ffn is None else functional.block
    return lambda i: call(i.x, i.params, spec, **i.aux, generator=generator(i.x.device))


class _AsFused(torch.autograd.Function):
    """`weigh` with the gradient of softmax that fused attention kernels have, PyTorch's among them, and eager
    FlexAttention: what each row's gradient loses is do · o rather than the sum of p dp.

    The two are equal but for rounding: the sum cancels the rounding of dp, which do · o knows nothing of. One sees it
    in gradients that a whole row cancels in, those of a key's bias or norm.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, row: Tensor, v: Tensor, keep: Tensor | None, p: float, sinks: Tensor | None
    ) -> Tensor:
        probs = probabilities(logits, row, sinks)
        dropped = dropout(probs, keep, p)
        o = torch.matmul(dropped, v)
        ctx.save_for_backward(probs, dropped.to(v.dtype), v, keep, o)
        ctx.beside = None if sinks is None else probabilities(torch.cat((logits, sink_logits(sinks, logits)), -1), row)
        ctx.p, ctx.dtype = p, logits.dtype
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        probs, dropped, v, keep, o = ctx.saved_tensors
        compute = torch.promote_types(do.dtype, torch.float32)
        do, o, v, probs = (t.to(compute) for t in (do, o, v, probs))
        dp = dropout(torch.matmul(do, v.mT), keep, ctx.p)
        delta = (do * o).sum(-1, keepdim=True)
        dv = torch.matmul(dropped.to(compute).mT, do)
        d_sinks = None if ctx.beside is None else -(ctx.beside[..., -1:] * delta).sum((0, 2, 3)).to(ctx.dtype)
        return (probs * (dp - delta)).to(ctx.dtype), None, dv.to(dropped.dtype), None, None, d_sinks


def plain(spec: BlockSpec, masks: Mapping[int, Tensor], eager: bool = False) -> Function:
    """The oracle; eager: with PyTorch's own attention kernel where it can be used, and its formulas elsewhere."""

    def call(i: Inputs) -> Tensor:
        with mock.patch.object(attention_module, "weigh", _AsFused.apply) if eager else contextlib.nullcontext():
            return eager_block(i.x, i.params, spec, **i.aux, masks=masks, eager=eager)

    return call


def run(function: Function, inputs: Inputs, autocast: torch.dtype | None = None) -> dict[str, Tensor]:
    """y and the gradient of x and of every parameter, by name."""
    x = inputs.x.detach().requires_grad_()
    params = {name: t.detach().requires_grad_() for name, t in inputs.params.items()}
    with torch.autocast(x.device.type, autocast) if autocast else contextlib.nullcontext():
        y = function(replace(inputs, x=x, params=params))
    grads = torch.autograd.grad(y, (x, *params.values()), inputs.dy.to(y.dtype))
    return {"y": y.detach(), **{f"d {name}": g for name, g in zip(("x", *params), grads, strict=True)}}


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """The oracle's many small operations run faster on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Errors:
    """Errors of one tensor in one draw of inputs, all by the tensor's scale: ||got - true||, ||eager - true|| and how
    far the truth itself moves where relu's derivative jumps (see ``kink_at``)."""

    got: float
    eager: float
    kink: float


KINKED = {"relu", "reglu"}
KINK_ULPS = 2.0  # four half-ulps: the input's rounding, the product's, and what the layers before them add


@contextlib.contextmanager
def kink_at(ulps: float, compute: torch.dtype) -> Iterator[None]:
    """The oracle with relu's step at `ulps` of the pre-activations' size instead of 0.

    Where a pre-activation lies within its rounding error of 0, relu's derivative may be 0 or 1: two runs that round
    differently disagree by a whole gradient entry there, and neither is wrong. Eager PyTorch's error says nothing about
    it: such entries are few, and flip in one run or in the other.
    """

    def relu(u: Tensor) -> Tensor:
        step = ulps * torch.finfo(compute).eps * u.detach().square().mean().sqrt()
        return torch.where(u > step, u, torch.zeros_like(u))

    with mock.patch.dict(FUNCTIONS, relu=relu):
        yield


@dataclass
class Expected:
    """The truth in float64 and eager PyTorch's runs in the type under test."""

    true: dict[str, Tensor]
    baselines: list[dict[str, Tensor]]
    compute: torch.dtype
    kinked: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None  # the truth with relu's step to either side of 0
    allowances: list[Callable[[Expected], None]] = field(default_factory=list)
    """Runs that can only allow more than what is known already: they are made where something fails."""

    def allow_more(self) -> bool:
        """Makes the next of the runs that allow more; False where there is none."""
        if not self.allowances:
            return False
        with one_thread():
            self.allowances.pop(0)(self)
        return True

    def errors(self, got: Mapping[str, Tensor]) -> dict[str, Errors]:
        """How far got and eager PyTorch are from the truth.

        Of eager PyTorch there may be several runs, two where there is attention, which can be had in two ways (as
        ``F.scaled_dot_product_attention`` computes it, or written out); the largest error counts. The scale is the
        truth's norm; of the gradient of a key's bias, which cancels to zero where softmax cannot see a shift, that of
        the query's bias.
        """
        errors = {}
        for name, t in self.true.items():
            like = self.true.get(name.replace("attn.k_", "attn.q_"), t) if name.endswith("_b") else t
            scale = max(*(float(torch.linalg.vector_norm(v)) for v in (t, like)), torch.finfo(torch.float64).tiny)
            first = self.baselines[0][name]
            assert (got[name].shape, got[name].dtype) == (first.shape, first.dtype), name
            base = max(_distance(run[name], t) for run in self.baselines)
            kink = _distance(self.kinked[0][name], self.kinked[1][name]) if self.kinked else 0.0
            errors[name] = Errors(_distance(got[name], t) / scale, base / scale, kink / scale)
        return errors

    def failures(self, got: Mapping[str, Tensor]) -> list[str]:
        return failures_in_draws([(self, got)])

    def check(self, got: Mapping[str, Tensor]) -> None:
        bad = self.failures(got)
        assert not bad, "\n" + "\n".join(bad)


def _distance(got: Tensor, true: Tensor) -> float:
    return float(torch.linalg.vector_norm(got.double() - true))


def failures(draws: Sequence[Mapping[str, Errors]], compute: torch.dtype) -> list[str]:
    """The tensors that break error <= 2 * eager PyTorch's + eps(compute) / 2 + kink, root mean squares over draws.

    Factor 2: both runs round at the same places in a different order, so that their errors are two draws of the same
    size, not the same draw. Half an ulp of the scale: a correctly rounded result alone may be off by that, and eager
    PyTorch may hit a representable value by luck. Kink: see ``kink_at``; 0 for every activation but relu's.
    """
    bad = []
    for name in draws[0]:
        errors = [draw[name] for draw in draws]
        error, base, kink = (
            math.sqrt(sum(value**2 for value in values) / len(draws))
            for values in zip(*((e.got, e.eager, e.kink) for e in errors), strict=True)
        )
        allowed = 2 * base + torch.finfo(compute).eps / 2 + kink
        if not error <= allowed:
            parts = f"eager PyTorch: {base:.3e}, kink {kink:.3e}"
            bad.append(f"{name}: relative error {error:.3e}, allowed {allowed:.3e} ({parts})")
    return bad


def failures_in_draws(draws: Sequence[tuple[Expected, Mapping[str, Tensor]]]) -> list[str]:
    """The tensors that break the rule of `failures`, all allowed that there is to allow."""
    while True:
        bad = failures([expected.errors(got) for expected, got in draws], draws[0][0].compute)
        if not bad or not all(expected.allow_more() for expected, _ in draws):
            return bad


def expect(
    spec: BlockSpec,
    inputs: Inputs,
    state: Tensor | None = None,
    masks: Mapping[int, Tensor] | None = None,
    autocast: torch.dtype | None = None,
    kink: bool = True,
) -> Expected:
    """Run the oracle on inputs: in float64 on the same (rounded) values, and in their own type.

    kink: where there is a relu, what is allowed is also how far the truth moves with its step.

    All of it on the inputs' device: a GPU's float64 is as good as the CPU's.
    """
    compute, wide = autocast or inputs.x.dtype, inputs.to(torch.float64)
    masks = masks_of(spec, inputs, state) if masks is None else masks

    def written_out(expected: Expected) -> None:
        expected.baselines.append(run(plain(spec, masks), inputs, autocast))

    def step_of_relu(expected: Expected) -> None:
        with kink_at(-KINK_ULPS, compute):
            below = run(plain(spec, masks), wide)
        with kink_at(KINK_ULPS, compute):
            expected.kinked = (below, run(plain(spec, masks), wide))

    kinked = kink and spec.ffn is not None and spec.ffn.act in KINKED
    with one_thread():
        true, baseline = run(plain(spec, masks), wide), run(plain(spec, masks, eager=True), inputs, autocast)
    allowances = [*([] if spec.attn is None else [written_out]), *([step_of_relu] if kinked else [])]
    return Expected(true, [baseline], compute, allowances=allowances)

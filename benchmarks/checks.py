"""The correctness that comes before any speed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.cases import Case
from benchmarks.differences import worst as place
from ckptfused.cli.models import LayerShape, plain_layers, variant_layers
from ckptfused.spec import KEEP_PRESETS


def gradients(layers: nn.ModuleList, x: Tensor, dy: Tensor, seed: int) -> dict[str, Tensor]:
    """Output and every gradient of one step whose dropout starts from ``seed``."""
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    layers.zero_grad(set_to_none=True)
    y: Tensor = x
    for layer in layers:
        y = layer(y)
    y.backward(dy)
    found = {"y": y.detach(), "x": x.grad}
    found |= {name: parameter.grad for name, parameter in layers.named_parameters()}
    layers.zero_grad(set_to_none=True)
    return {name: value for name, value in found.items() if value is not None}


def worst_error(
    exact: dict[str, Tensor], eager: dict[str, Tensor], ours: dict[str, Tensor], dtype: torch.dtype
) -> float:
    """The largest share of the allowed error that a gradient of ours uses; ends the run where it is more than all.

    Allowed is twice the eager error in the same dtype, plus half an ulp of the tensor's scale (two rounding histories
    of one length rarely differ by more).
    """
    worst = 0.0
    for name, reference in exact.items():
        scale = torch.finfo(dtype).eps / 2 * reference.norm()
        allowed = 2 * (eager[name].double() - reference).norm() + scale
        error = (ours[name].double() - reference).norm()
        if not error <= allowed:
            raise SystemExit(
                f"gradient check failed, no time reported: {name}: error {error:.3g}, allowed {allowed:.3g}; "
                f"{place(ours[name], reference)}"
            )
        worst = max(worst, float(error / allowed))
    return worst


def refuse_difference(kept: dict[str, Tensor], rebuilt: dict[str, Tensor], keep: str = "inputs") -> None:
    """Ends the run unless every gradient has the same bits with everything kept and with so much."""
    for name, value in kept.items():
        if not torch.equal(value, rebuilt[name]):
            raise SystemExit(
                f"gradient check failed, no time reported: {name} differs between keep='all' and {keep!r}; "
                f"{place(rebuilt[name], value)}"
            )


def check_gradients(case: Case, dtype: torch.dtype, seed: int, device: str = "cpu", whole: bool = False) -> list[str]:
    """Raises unless ckptfused's gradients are right; returns what was shown.

    Without dropout, each tensor's error against a run in higher precision is within `worst_error`'s limits. With
    dropout, every preset gives the bits of keeping everything. whole: at the case's own batch and length against
    float32; else a quarter of the tokens of one sequence, which keeps it short, against float64.
    """
    batch, tokens = (case.batch, case.tokens) if whole else (1, max(case.tokens // 4, 1))
    generator = torch.Generator(device).manual_seed(seed + 1)
    size = (batch, tokens, case.shape.d_model)
    x, dy = (torch.randn(size, generator=generator, device=device).to(dtype) for _ in range(2))

    calm, wide = replace(case.shape, residual_dropout=0.0), torch.float32 if whole else torch.float64
    plain = plain_layers(calm, dtype=dtype, seed=seed, device=device)
    truth = plain_layers(calm, dtype=wide, seed=seed, device=device)
    truth.load_state_dict(plain.state_dict())  # the weights as rounded to dtype, in higher precision
    with mock.patch.object(F, "scaled_dot_product_attention", _ungrouped):
        exact = gradients(truth, x.to(wide), dy.to(wide), seed)
    del truth
    eager = gradients(plain, x, dy, seed)
    ours = gradients(variant_layers("ckptfused inputs", plain, calm), x, dy, seed)
    worst = worst_error(exact, eager, ours, dtype)
    del exact, eager, ours
    both = same_bits(case.shape, plain, x, dy, seed, KEEP_PRESETS if whole else ("inputs",))
    precision = str(wide).removeprefix("torch.")
    return [
        f"{batch} x {tokens} tokens: without dropout at most {worst:.2f} of the allowed error against {precision}",
        both,
    ]


_attention = F.scaled_dot_product_attention


def _ungrouped(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, enable_gqa: bool) -> Tensor:
    """PyTorch's attention in float32 holds all probabilities where heads share keys, but not where each has its own."""
    groups = q.size(1) // k.size(1)
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    return _attention(q, k, v, is_causal=is_causal)


def same_bits(
    shape: LayerShape, plain: nn.ModuleList, x: Tensor, dy: Tensor, seed: int, keeps: Collection[str] = ("inputs",)
) -> str:
    """Raises unless, with dropout, every gradient has the same bits however much is kept.

    On a GPU under deterministic algorithms: without them PyTorch's own kernels give other bits every time.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before or x.is_cuda)
    try:
        layers = variant_layers("ckptfused all", plain, shape)
        kept = gradients(layers, x, dy, seed)
        for keep in keeps:
            for layer in layers:
                layer.keep = keep  # type: ignore[assignment]
            refuse_difference(kept, gradients(layers, x, dy, seed), keep)
    finally:
        torch.use_deterministic_algorithms(before)
    return f"with dropout {shape.residual_dropout} the same bits keeping everything and saving {', '.join(keeps)} only"

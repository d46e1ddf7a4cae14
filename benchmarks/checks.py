"""The correctness that comes before any speed."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from benchmarks.cases import Case
from ckptfused.cli.models import Shape, plain_layers, variant_layers


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
                f"gradient check failed, no time reported: {name}: error {error:.3g}, allowed {allowed:.3g}"
            )
        worst = max(worst, float(error / allowed))
    return worst


def refuse_difference(kept: dict[str, Tensor], rebuilt: dict[str, Tensor]) -> None:
    """Ends the run unless every gradient has the same bits with everything kept and with inputs alone saved."""
    for name, value in kept.items():
        if not torch.equal(value, rebuilt[name]):
            raise SystemExit(f"gradient check failed, no time reported: {name} differs between keep='all' and 'inputs'")


def check_gradients(case: Case, dtype: torch.dtype, seed: int, device: str = "cpu") -> list[str]:
    """Raises unless ckptfused's gradients are right; returns what was shown.

    Without dropout, each tensor's error against a float64 run is within `worst_error`'s limits. With dropout, saving
    inputs only gives the bits of keeping everything. A quarter of the tokens keeps it short.
    """
    tokens = max(case.tokens // 4, 1)
    generator = torch.Generator().manual_seed(seed + 1)
    size = (1, tokens, case.shape.d_model)
    x, dy = (torch.randn(size, generator=generator).to(device, dtype) for _ in range(2))

    calm = replace(case.shape, residual_dropout=0.0)
    plain = plain_layers(calm, dtype=dtype, seed=seed).to(device)
    truth = plain_layers(calm, dtype=torch.float64, seed=seed).to(device)
    truth.load_state_dict(plain.state_dict())  # the weights as rounded to dtype, in float64
    exact = gradients(truth, x.double(), dy.double(), seed)
    eager = gradients(plain, x, dy, seed)
    ours = gradients(variant_layers("ckptfused inputs", plain, calm).to(device), x, dy, seed)
    worst = worst_error(exact, eager, ours, dtype)
    both = same_bits(case.shape, plain, x, dy, seed)
    return [f"without dropout at most {worst:.2f} of the allowed error against float64", both]


def same_bits(shape: Shape, plain: nn.ModuleList, x: Tensor, dy: Tensor, seed: int) -> str:
    """Raises unless, with dropout, every gradient has the same bits however much is kept.

    On a GPU under deterministic algorithms: without them PyTorch's own kernels give other bits every time.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before or x.is_cuda)
    try:
        kept = gradients(variant_layers("ckptfused all", plain, shape).to(x.device), x, dy, seed)
        rebuilt = gradients(variant_layers("ckptfused inputs", plain, shape).to(x.device), x, dy, seed)
    finally:
        torch.use_deterministic_algorithms(before)
    refuse_difference(kept, rebuilt)
    return f"with dropout {shape.residual_dropout} the same bits keeping everything and saving inputs only"

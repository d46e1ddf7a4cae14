"""xIELU, the activation whose coefficients are trained (Apertus)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ckptfused
from ckptfused import FusedCheckpointBlock, FusedCheckpointFFN, cost, functional, rng
from ckptfused.modules import XIELU
from ckptfused.spec import KEEP_PRESETS, BlockSpec, FFNSpec
from tests.devices import on_devices

B, T, C, HIDDEN = 2, 75, 24, 40
DOUBLE = torch.float64
WHOLE, ROWS, COLUMNS = 0, 1, 60_000


def spec_of(keep: str = "inputs", scratch: int = WHOLE, hidden: int = HIDDEN, **options: Any) -> BlockSpec:
    return BlockSpec(ffn=FFNSpec("xielu", hidden, pre="rmsnorm", **options), scratch=scratch).with_keep(keep)


def made(dtype: torch.dtype = DOUBLE, hidden: int = HIDDEN, device: str = "cpu") -> tuple[Tensor, dict[str, Tensor]]:
    """x and the parameters. eps is so far below 0 that a tenth of the hidden values lies between."""
    draw = torch.Generator().manual_seed(2)
    params = {
        "ffn.up_w": torch.randn(hidden, C, generator=draw, dtype=DOUBLE) * C**-0.5,
        "ffn.down_w": torch.randn(C, hidden, generator=draw, dtype=DOUBLE) * hidden**-0.5,
        "ffn.coefficients": torch.tensor([0.7, 1.25, 0.5, -0.3], dtype=DOUBLE),
    }
    x = torch.randn(B, T, C, generator=draw, dtype=DOUBLE)
    return x.to(device, dtype).requires_grad_(), {n: t.to(device, dtype).requires_grad_() for n, t in params.items()}


def written_out(x: Tensor, params: dict[str, Tensor], keep: Tensor | None = None, p: float = 0.0) -> Tensor:
    u = F.linear(F.rms_norm(x, (C,), eps=1e-5), params["ffn.up_w"])
    a, n, b, eps = params["ffn.coefficients"]
    h = torch.where(u > 0, a * u * u + b * u, (torch.expm1(torch.min(u, eps)) - u) * n + b * u)
    h = h if keep is None else h * keep / (1 - p)
    return x + F.linear(h, params["ffn.down_w"])


def gradients(y: Tensor, x: Tensor, params: dict[str, Tensor]) -> list[Tensor]:
    weights = torch.randn(y.shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(3)).to(y)
    return [y, *torch.autograd.grad(y, [x, *params.values()], weights, retain_graph=True)]


@on_devices
@pytest.mark.parametrize("scratch", [WHOLE, ROWS, COLUMNS], ids=["whole", "rows", "columns"])
@pytest.mark.parametrize("keep", KEEP_PRESETS)
def test_every_gradient(keep: str, scratch: int, device: str) -> None:
    """In tiles of rows and of columns the sums go over all of them."""
    hidden = 2000 if scratch == COLUMNS else HIDDEN
    tiles = {WHOLE: (B * T, hidden), ROWS: (64, hidden), COLUMNS: (B * T, 64)}
    assert cost.ffn_tiles(B * T, C, hidden, False, 8, scratch) == tiles[scratch]
    x, params = made(hidden=hidden, device=device)
    spec = spec_of("all" if keep == "all" else "inputs", scratch, hidden)
    y = functional.ffn_block(x, params, spec)
    for a, b in zip(gradients(y, x, params), gradients(written_out(x, params), x, params), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scratch", [WHOLE, ROWS], ids=["whole", "rows"])
def test_kept_or_not_the_bits_are_the_same(scratch: int) -> None:
    x, params = made(torch.bfloat16)
    kept, rebuilt = (
        gradients(functional.ffn_block(x, params, spec_of(keep, scratch)), x, params) for keep in ("all", "inputs")
    )
    y = functional.ffn_block(x, params, spec_of())
    again = [gradients(y, x, params) for _ in range(2)]
    assert all(map(torch.equal, kept, rebuilt))
    assert all(map(torch.equal, *again))


def test_dropout_takes_its_part_of_the_sums() -> None:
    x, params = made()
    p = 0.25
    torch.manual_seed(5)
    state = torch.ops.ckptfused.rng_state(x, 0)
    torch.manual_seed(5)
    y = functional.ffn_block(x, params, spec_of(p_hidden=p))
    keep = rng.dropout_mask((B, T, HIDDEN), p, state, 2)
    for a, b in zip(
        gradients(y, x, params), gradients(written_out(x, params, keep.double(), p), x, params), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_as_near_as_pytorch(dtype: torch.dtype) -> None:
    """To float64 at the same inputs: the sums are float32's, PyTorch's are of rounded terms."""
    x, params = made(dtype)
    wide, wide_params = x.detach().double().requires_grad_(), {n: t.detach().double() for n, t in params.items()}
    wide_params = {n: t.requires_grad_() for n, t in wide_params.items()}
    exact = gradients(written_out(wide, wide_params), wide, wide_params)
    ours = gradients(functional.ffn_block(x, params, spec_of()), x, params)
    plain = gradients(written_out(x, params), x, params)
    for a, b, c in zip(ours, plain, exact, strict=True):
        error, of_plain = (float(((t.double() - c).norm() / c.norm()).detach()) for t in (a, b))
        assert error <= 1.5 * of_plain + torch.finfo(dtype).eps


@pytest.mark.parametrize("wanted", ["ffn.coefficients", "ffn.up_w", "ffn.down_w"])
def test_one_gradient_alone(wanted: str) -> None:
    x, params = made()
    alone = {n: t.detach().requires_grad_(n == wanted) for n, t in params.items()}
    y = functional.ffn_block(x.detach(), alone, spec_of())
    weights = torch.randn_like(y)
    (found,) = torch.autograd.grad(y, [alone[wanted]], weights)
    (expected,) = torch.autograd.grad(written_out(x, params), [params[wanted]], weights)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_behind_a_closing_norm_the_coefficients_alone() -> None:
    """The gradient of a closing norm is asked for, though nothing in front of it is trained."""
    x, params = made()
    frozen = {n: t.detach() for n, t in params.items()} | {"ffn.out_w": torch.rand(C, dtype=DOUBLE)}
    frozen["ffn.coefficients"].requires_grad_()
    y = functional.ffn_block(x.detach(), frozen, spec_of(out="rmsnorm"))
    weights = torch.randn_like(y)
    (found,) = torch.autograd.grad(y, [frozen["ffn.coefficients"]], weights)
    expected = F.rms_norm(written_out(x, params), (C,), frozen["ffn.out_w"], eps=1e-5)
    torch.testing.assert_close(
        found, *torch.autograd.grad(expected, [params["ffn.coefficients"]], weights), rtol=1e-9, atol=1e-10
    )


def test_values_at_eps_and_at_zero() -> None:
    """Where both arguments of the minimum are equal, each has half of the slope, as in PyTorch."""
    u = torch.tensor([[-0.25, -0.25, 0.0, -0.0, -0.125, 0.5]], dtype=DOUBLE)
    c = torch.tensor([0.7, 1.25, 0.5, -0.25], dtype=DOUBLE, requires_grad=True)
    leaf = u.clone().requires_grad_()
    h = torch.where(leaf > 0, c[0] * leaf * leaf + c[2] * leaf,
                    (torch.expm1(torch.min(leaf, c[3])) - leaf) * c[1] + c[2] * leaf)  # fmt: skip
    du, dc = torch.autograd.grad(h.sum(), [leaf, c])
    out, slope, sums = torch.empty_like(u), torch.empty_like(u), torch.zeros(1, 4, dtype=DOUBLE)
    ones = torch.ones_like(u)
    torch.ops.ckptfused.activation_bwd(
        u, u, ones, None, out, None, slope, "xielu", 0.0, 2, 6, 0, 0, [], c.detach(), sums
    )
    for a, b in ((out, h), (slope, du), (sums[0], dc)):
        torch.testing.assert_close(a, b.detach(), rtol=1e-12, atol=1e-12)


def test_second_derivatives() -> None:
    x, params = made()
    inputs = [x[:, :3].detach().requires_grad_(), *params.values()]

    def run(x: Tensor, *tensors: Tensor) -> Tensor:
        return functional.ffn_block(x, dict(zip(params, tensors, strict=True)), spec_of())

    assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize("kind", [FusedCheckpointFFN, FusedCheckpointBlock])
def test_as_a_module(kind: Any) -> None:
    """The name makes the module, which has the block's type; its parameters are trained and saved."""
    options = {"dim_feedforward": HIDDEN, "dropout": 0.0, "activation": "xielu", "batch_first": True, "dtype": DOUBLE}
    options |= {"nhead": 4} if kind is FusedCheckpointBlock else {}
    block: Any = kind(C, **options)
    assert block.generic_reason() is None and "xielu" in block.spec(DOUBLE).to_string()
    assert {n for n in block.state_dict() if "alpha" in n} == {"activation.alpha_p", "activation.alpha_n"}
    x = torch.randn(B, T, C, dtype=DOUBLE, requires_grad=True)
    spelled_out = block._plain(x) if kind is FusedCheckpointFFN else block._plain(x, None, None, False)
    leaves = [x, *block.parameters()]
    pairs = zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (block(x), spelled_out)), strict=True)
    for a, b in [(block(x), spelled_out), *pairs]:
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)
    block.float()
    block.activation = "xielu"
    assert block.activation.alpha_p.dtype == torch.float32 and block(x.float()).isfinite().all()


def test_in_pytorchs_own_layers() -> None:
    layer = torch.nn.TransformerEncoderLayer(C, 4, HIDDEN, 0.0, XIELU(dtype=DOUBLE), batch_first=True, dtype=DOUBLE)
    plain = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    fused = copy.deepcopy(plain)
    report = ckptfused.convert(fused)
    assert [one.path for one in report.layers] == ["fused"] * 2
    x = torch.randn(B, 9, C, dtype=DOUBLE)
    pairs = zip(*(torch.autograd.grad(m(x).square().sum(), [*m.parameters()]) for m in (plain, fused)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def test_another_activation_takes_its_place() -> None:
    block = FusedCheckpointBlock(C, 4, HIDDEN, activation="xielu", batch_first=True)
    block.activation = "relu"
    assert block.generic_reason() is None and not [n for n in block.state_dict() if "alpha" in n]
    assert "ffn.act=relu" in block.spec().to_string()


def test_a_nan_reaches_the_gradients() -> None:
    x, params = made()
    with torch.no_grad():
        x[0, 0, 0] = torch.nan
    y = functional.ffn_block(x, params, spec_of())
    found = torch.autograd.grad(y.sum(), [x, *params.values()])
    expected = torch.autograd.grad(written_out(x, params).sum(), [x, *params.values()])
    for a, b in zip(found[:3], expected[:3], strict=True):
        assert a.isnan().any() and torch.equal(a.isnan(), b.isnan())


def test_its_first_coefficients_are_those_of_the_paper() -> None:
    act = XIELU(0.75, 1.5, beta=0.25, eps=-1e-3, dtype=DOUBLE)
    torch.testing.assert_close(act.coefficients().detach(), torch.tensor([0.75, 1.5, 0.25, -1e-3], dtype=DOUBLE))
    with pytest.raises(ValueError, match="alpha_n_init > beta"):
        XIELU(alpha_n_init=0.5)


def test_a_call_without_coefficients_is_refused() -> None:
    x, params = made()
    del params["ffn.coefficients"]
    with pytest.raises(ValueError, match="coefficients"):
        functional.ffn_block(x, params, spec_of())
    u = torch.ones(2, 3)
    with pytest.raises(RuntimeError, match="coefficients: expected \\[4\\] for xielu"):
        torch.ops.ckptfused.activation_fwd(u, u, None, u, "xielu", 0.0, 2, 3, 0, 0, [])
    with pytest.raises(RuntimeError, match="coefficients: expected none for relu"):
        torch.ops.ckptfused.activation_fwd(u, u, None, u, "relu", 0.0, 2, 3, 0, 0, [], torch.ones(4))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_apertus_trains_as_it_did(implementation: str) -> None:
    """Three steps of SGD with the coefficients among what is trained."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "vocab_size": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    rope = {"rope_theta": 1e4, "rope_type": "default"}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.ApertusConfig(
        **sizes, **special, rope_parameters=rope, attn_implementation=implementation, dtype="float32"
    )
    torch.manual_seed(0)
    plain = transformers.ApertusForCausalLM(config).train()
    fused = copy.deepcopy(plain)
    report = ckptfused.convert(fused)
    assert [layer.path for layer in report.layers] == ["fused"] * 2
    ids = torch.randint(3, 64, (2, 12))
    losses: list[list[float]] = [[], []]
    for model, seen in zip((plain, fused), losses, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            seen.append(float(loss.detach()))
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-5, atol=1e-6)
    moved = [n for n, p in fused.named_parameters() if "alpha" in n and p.grad is not None and p.grad.any()]
    assert len(moved) == 4
    for (name, a), b in zip(plain.named_parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")

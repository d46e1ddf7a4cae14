"""Calls of ffn_up_fwd and ffn_up_bwd: inputs, runs of the Triton launchers and of plain PyTorch, the comparison."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

import ckptfused.rng
from ckptfused.eager.activation import activation
from ckptfused.spec import GATED_ACTIVATIONS, PLAIN_ACTIVATIONS
from ckptfused.triton.ffn.launch import ffn_up_bwd, ffn_up_fwd
from tests.oracle import KINK_ULPS, KINKED, Errors, failures, kink_at

SITE = ckptfused.rng.FFN_HIDDEN
Values = dict[str, Tensor]


@dataclass(frozen=True)
class Call:
    n: int = 17
    c: int = 64
    f: int = 37
    act: str = "swiglu"
    dtype: torch.dtype = torch.bfloat16
    transposed: bool = False
    joint: bool = False
    bias: torch.dtype | None = None
    p: float = 0.0
    row0: int = 0
    col0: int = 0
    cols: int = 0  # 0: col0 + f
    rows: tuple[int, ...] = ()
    config: str = ""

    @property
    def gated(self) -> bool:
        return self.act in GATED_ACTIVATIONS

    @property
    def mask_cols(self) -> int:
        return self.cols or self.col0 + self.f

    @property
    def mask_args(self) -> tuple[float, int, int, int, int, tuple[int, ...]]:
        return self.p, SITE, self.mask_cols, self.row0, self.col0, self.rows

    @property
    def id(self) -> str:
        default = Call()
        changed = {k: v for k, v in vars(self).items() if v != getattr(default, k)}
        return "-".join(f"{k}={str(v).removeprefix('torch.')}" for k, v in changed.items()) or "plain"


def make_inputs(call: Call, device: str = "cpu", seed: int = 0) -> Values:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(call.dtype)

    n, c, f = call.n, call.c, call.f
    values = {"x": normal(n, c), "ddown": normal(n, c), "down_w": normal(c, f, std=c**-0.5)}
    both = normal(2 * f, c, std=c**-0.5)
    if call.transposed:  # a weight of its own memory, [C, F]
        both, values["down_w"] = both.t().contiguous().t(), values["down_w"].t().contiguous().t()
    if not call.joint:
        both = both if call.gated else both[:f]
    values |= {"gate_w": both[:f], "up_w": both[f:]} if call.gated else {"up_w": both[:f]}
    if not call.joint:
        values |= {
            k: v.t().contiguous().t() if call.transposed else v.contiguous() for k, v in values.items() if "_w" in k
        }
    if call.bias is not None:
        values |= {name: normal(f, std=0.2).to(call.bias) for name in (("gate_b", "up_b") if call.gated else ("up_b",))}
    values["rng_state"] = torch.tensor([0x1234567890ABCDEF, (3 << 40) + 9])
    return {name: t.to(device) for name, t in values.items()}


def _weight(call: Call, values: Values, name: str) -> Tensor | None:
    w = values.get(name)
    return w.t() if w is not None and call.transposed else w


def run_forward(call: Call, values: Values, keep_gu: bool = True) -> Values:
    """h, g and u; NaN where nothing was written."""
    out = {name: torch.full((call.n, call.f), torch.nan, dtype=call.dtype, device=values["x"].device) for name in "hgu"}
    g = out["g"] if keep_gu and call.gated else None
    ffn_up_fwd(
        values["x"], _weight(call, values, "gate_w"), _weight(call, values, "up_w"), values.get("gate_b"),
        values.get("up_b"), values["rng_state"] if call.p else None, out["h"], g, out["u"] if keep_gu else None,
        call.act, call.transposed, *call.mask_args, call.config,
    )  # fmt: skip
    return out if call.gated else {name: out[name] for name in "hu"}


def run_backward(
    call: Call, values: Values, kept: Values | None = None, wanted: tuple[str, ...] = ("h", "dg", "du")
) -> Values:
    """h, dg and du, those wanted; kept: from the g and u of a forward."""
    wanted = tuple(name for name in wanted if call.gated or name != "dg")
    like = torch.full((call.n, call.f), torch.nan, dtype=call.dtype, device=values["x"].device)
    out = {name: like.clone() for name in wanted}
    replay = kept is None
    ffn_up_bwd(
        values["x"] if replay else None, _weight(call, values, "gate_w") if replay else None,
        _weight(call, values, "up_w") if replay else None, values.get("gate_b") if replay else None,
        values.get("up_b") if replay else None, None if replay else kept.get("g"), None if replay else kept["u"],
        values["ddown"], _weight(call, values, "down_w"), values["rng_state"] if call.p else None,
        out.get("h"), out.get("dg"), out.get("du"), call.act, call.transposed, *call.mask_args, call.config,
    )  # fmt: skip
    return out


def keep_mask(call: Call, values: Values) -> Tensor:
    """bool [n, f]: the call's part of the whole mask."""
    state = values["rng_state"].cpu()
    if call.rows:
        batch, tokens = call.rows
        whole = ckptfused.rng.dropout_mask((batch, tokens, call.mask_cols), call.p, state, SITE)
        whole = whole.transpose(0, 1).reshape(batch * tokens, call.mask_cols)
    else:
        whole = ckptfused.rng.dropout_mask((call.row0 + call.n, call.mask_cols), call.p, state, SITE)
    return whole[call.row0 : call.row0 + call.n, call.col0 : call.col0 + call.f]


def plain(call: Call, values: Values, dtype: torch.dtype) -> Values:
    """Ordinary PyTorch on the CPU, in dtype."""
    v = {name: t.cpu().to(dtype) for name, t in values.items() if name != "rng_state"}
    pre = {"u": F.linear(v["x"], v["up_w"], v.get("up_b"))}
    if call.gated:
        pre["g"] = F.linear(v["x"], v["gate_w"], v.get("gate_b"))
    leaves = {name: t.detach().requires_grad_() for name, t in pre.items()}
    h = activation(leaves.get("g"), leaves["u"], call.act)
    if call.p:
        h = torch.where(keep_mask(call, values), h * ckptfused.rng.keep_scale(call.p), torch.zeros_like(h))
    grads = torch.autograd.grad(h, list(leaves.values()), v["ddown"] @ v["down_w"])
    return {"h": h.detach(), **pre, **{f"d{name}": g for name, g in zip(leaves, grads, strict=True)}}


def check(call: Call, values: Values, got: Values) -> None:
    """The rule of tests/oracle.py: error <= 2 * eager PyTorch's in the same type + half an ulp (+ relu's kink)."""
    true, eager = plain(call, values, torch.float64), plain(call, values, call.dtype)
    kinked = None
    if call.act in KINKED:
        with kink_at(-KINK_ULPS, call.dtype):
            below = plain(call, values, torch.float64)
        with kink_at(KINK_ULPS, call.dtype):
            kinked = below, plain(call, values, torch.float64)
    errors = {}
    for name, t in got.items():
        assert t.dtype == call.dtype and t.shape == true[name].shape, name
        size = max(float(true[name].norm()), torch.finfo(torch.float64).tiny)
        off = [float((v.double().cpu() - true[name]).norm()) / size for v in (t, eager[name])]
        kink = float((kinked[0][name] - kinked[1][name]).norm()) / size if kinked else 0.0
        errors[name] = Errors(off[0], off[1], kink)
    bad = failures([errors], call.dtype)
    assert not bad, "\n" + "\n".join(bad)


def check_all(call: Call, device: str = "cpu", alone: bool = True) -> None:
    """Forward, replay and the backward from kept values against PyTorch, and their bits against each other.

    alone: each output also by itself; four more kernels to compile.
    """
    values = make_inputs(call, device)
    forward = run_forward(call, values)
    replayed = run_backward(call, values)
    check(call, values, {**forward, **replayed})
    kept = run_backward(call, values, forward)
    assert torch.equal(replayed["h"], forward["h"])
    for name, t in kept.items():
        assert torch.equal(t, replayed[name]), name
    if call.p:
        keep = keep_mask(call, values)
        for name, t in replayed.items():
            assert not t.cpu()[~keep].any(), name
    if not alone:
        return
    # What is not asked for changes nothing in what is.
    assert torch.equal(run_forward(call, values, keep_gu=False)["h"], forward["h"])
    for wanted in ("h", "dg", "du"):
        for name, t in run_backward(call, values, wanted=(wanted,)).items():
            assert torch.equal(t, replayed[name]), name


def check_mask(p: float, device: str = "cpu") -> None:
    """Where nothing else makes a zero, the zeros of h are the mask of the C++ Philox, bit for bit."""
    call = Call(n=40, f=75, act="silu", p=p, row0=3, col0=5, cols=90)
    values = make_inputs(call, device)
    values["up_w"] = values["up_w"].abs() + 1
    values["x"] = values["x"].abs() + 1
    kept = run_forward(call, values)["h"] != 0
    assert torch.equal(kept.cpu(), keep_mask(call, values))
    assert torch.equal(run_backward(call, values)["h"].cpu() != 0, keep_mask(call, values))


def cases() -> list[Call]:
    """Every activation, every odd length, every layout."""
    base = Call()
    found = [replace(base, act=act) for act in PLAIN_ACTIVATIONS]
    found += [replace(base, act=act, p=0.3) for act in (*GATED_ACTIVATIONS, "relu2")]
    found += [replace(base, n=n, c=c, f=f) for n, c, f in ((1, 24, 8), (17, 100, 130), (130, 24, 37), (33, 64, 64))]
    found += [replace(base, dtype=torch.float16, bias=b) for b in (torch.float16, torch.float32)]
    layouts = ((False, True), (True, False), (True, True))
    found += [replace(base, transposed=t, joint=j, bias=torch.bfloat16) for t, j in layouts]
    found += [replace(base, act="gelu_tanh", transposed=True, bias=torch.bfloat16, p=0.1)]
    found += [replace(base, p=0.5, row0=r, col0=c, cols=cols) for r, c, cols in ((0, 64, 130), (5, 0, 40), (64, 3, 99))]
    found += [replace(base, n=12, p=0.4, rows=(3, 4)), replace(base, n=9, p=0.4, row0=5, col0=8, cols=80, rows=(3, 7))]
    found += [replace(base, p=1.0)]
    return found

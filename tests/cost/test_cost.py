"""cost.py against what PyTorch counts: saved bytes, peak scratch, matrix products made and replayed.

Allocated bytes on the CPU alone: a GPU's allocator rounds them, and gpu/test_memory holds those to cost.py.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import ckptfused
from ckptfused import cost
from ckptfused.cost import attention as attention_cost
from ckptfused.cost.products import AttentionWork
from ckptfused.spec import (
    AUX_NAMES,
    KEEP_PRESETS,
    Adapter,
    AttentionSpec,
    BlockSpec,
    FFNSpec,
    keepable,
    param_names,
    param_shapes,
)
from ckptfused.triton import backend
from tests import cases, forks
from tests.accounting import ATTENTION, Events, saved_bytes
from tests.cases import Case
from tests.devices import CUDA, on_devices
from tests.oracle import Inputs, fused, make_inputs

LLAMA = Case(mask="causal", act="swiglu", norm="rmsnorm", rope="half", heads="4/2", batch=2, tokens=33)
CASES = {
    "llama": LLAMA,
    "llama-joint-dropout": replace(LLAMA, weights="joint", drop="all", m=0.5, rope="half-wide"),
    "llama-one-token": replace(LLAMA, weights="joint", drop="all", rope="half-wide", tokens=1),
    "post": Case(layout="post", act="gelu", bias="all", drop="res", transposed=True, tokens=33),
    "sandwich": replace(LLAMA, layout="sandwich", norm="gemma", qk_norm="gemma", softcap=5.0, act="geglu_tanh"),
    "coefficients": Case(layout="mlp", act="xielu", drop="hidden", tokens=130, batch=2, scratch=1),
    "pre+out": Case(layout="pre+out", act="relu2", qk_norm="layernorm", rope="interleaved-batch", tokens=33),
    "parallel": replace(LLAMA, layout="parallel", norm="layernorm", bias="all"),
    "shared": replace(LLAMA, layout="shared", drop="res", bias="qkv"),
    "attention": replace(LLAMA, layout="attn", qk_norm="rmsnorm", window=3, tokens=150),
    "ffn": Case(layout="ffn", act="swiglu", weights="joint", bias="all", drop="hidden", batch=2, tokens=33),
    "seq-first": replace(LLAMA, seq_first=True, mask="none", bias="all"),
    "seq-first-masked": replace(LLAMA, seq_first=True, mask="causal+pad", bias="all"),
    "interleaved": Case(layout="parallel", weights="interleaved", rope="half", qk_norm="layernorm", tokens=33),
    "adapters": replace(LLAMA, lora="drop", bias="all"),
    "adapters-joint": replace(LLAMA, lora="twice", weights="joint", layout="sandwich", transposed=True, seq_first=True),
    "adapters-ffn": replace(LLAMA, layout="ffn", mask="none", act="gelu", lora="float32", tokens=700),
    "packed": Case(mask="packed-causal", act="swiglu", tokens=67),
    "gate": replace(LLAMA, gate="entry", qk_norm="rmsnorm"),
    "gate-of-heads": replace(LLAMA, gate="head", layout="closed-heads", drop="all", seq_first=True),
    "gate-in-q": replace(LLAMA, gate="in-q", layout="heads", tokens=150),
    "mlp": replace(LLAMA, layout="closed-mlp", mask="none", drop="all"),
    "by-position": replace(LLAMA, q_scale="batch", rope="half-wide"),
}
TYPES = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None),
    "autocast": (torch.float32, torch.bfloat16),
}
# Every case in float32; in the other types those that differ there.
RUNS = [(name, "float32") for name in CASES]
RUNS += [
    (n, kind)
    for kind in ("bfloat16", "autocast")
    for n in ("llama-joint-dropout", "sandwich", "shared", "adapters-joint", "by-position")
]

RUNS_ON = [(*run, "cpu") for run in RUNS] + [pytest.param(*run, "cuda", marks=CUDA.marks) for run in RUNS]


@dataclass
class Ops:
    """block_fwd and block_bwd of a case, and what cost.py says about them."""

    case: Case
    spec: BlockSpec
    inputs: Inputs

    def __post_init__(self) -> None:
        halves = (self.spec.attn, self.spec.ffn)
        family = "block" if all(halves) else "attention_block" if self.spec.attn else "ffn_block"
        params = [self.inputs.params.get(name) for name in param_names(self.spec)]
        aux = [self.inputs.aux.get(name) for name in AUX_NAMES]
        rng = torch.tensor([1, 2], device=self.inputs.x.device) if self.spec.has_dropout else None
        fwd = getattr(torch.ops.ckptfused, f"{family}_fwd").default
        bwd = getattr(torch.ops.ckptfused, f"{family}_bwd").default
        x, dy, text = self.inputs.x, self.inputs.dy, self.spec.to_string()
        self.forward: Callable[[], list[Tensor]] = lambda: fwd(x, params, aux, rng, text, True)

        def backward(kept: list[Tensor], needs: Collection[str]) -> list[Tensor]:
            asked = [name in needs for name in ("x", *param_names(self.spec))]
            return bwd(dy, x, params, aux, kept, rng, text, asked)

        self.backward = backward
        self.dims = (self.case.batch, self.case.tokens, self.case.width)
        self.names = ("x", *self.inputs.params)
        bounds = self.inputs.aux.get("cu_seqlens")
        self.arguments: dict[str, Any] = {
            "params": {name: t.dtype for name, t in self.inputs.params.items()},
            "lengths": None if bounds is None else bounds.diff().tolist(),
            "tables": {n: (t.shape, t.dtype) for n, t in self.inputs.aux.items() if n in ("cos", "sin", "q_scale")},
        }

    def forward_scratch(self) -> int:
        return cost.forward_scratch(self.spec, *self.dims, self.inputs.x.dtype, **self.arguments)

    def ledgers(self) -> tuple[cost.Ledger, cost.Ledger]:
        """Ledgers of the forward and of a backward with all gradients."""
        call = (self.spec, *self.dims, self.inputs.x.dtype)
        return cost.forward_ledger(*call, **self.arguments), cost.backward_ledger(*call, **self.arguments)

    def backward_scratch(self, needs: Collection[str]) -> int:
        return cost.backward_scratch(self.spec, *self.dims, self.inputs.x.dtype, needs=needs, **self.arguments)

    def backward_work(self, needs: Collection[str]) -> list[cost.Product | cost.AttentionWork]:
        return cost.backward_work(self.spec, *self.dims, needs, self.inputs.x.dtype)


def make_ops(case: Case, kind: str = "float32", keep: str = "inputs", device: str = "cpu") -> Ops:
    dtype, compute = TYPES[kind]
    spec = replace(case.spec().with_keep(keep), compute=str(compute).removeprefix("torch.") if compute else None)
    return Ops(case, spec, make_inputs(case, dtype, device=device))


def _products_are_seen(ops: Ops) -> bool:
    """Whether every product that PyTorch makes is a projection's: on a GPU adapters, too, are made of products."""
    return ops.inputs.x.is_cpu or not ops.spec.adapters


def _flops(work: Collection[cost.Product | cost.AttentionWork]) -> int:
    return sum(item.flops for item in work if isinstance(item, cost.Product))


def _shapes(work: Collection[cost.Product | cost.AttentionWork]) -> Counter[tuple[int, int, int]]:
    return Counter((item.n, item.k, item.c) for item in work if isinstance(item, cost.Product))


@pytest.mark.parametrize("keep", KEEP_PRESETS)
@pytest.mark.parametrize(("name", "kind", "device"), RUNS_ON)
def test_saved_bytes(name: str, kind: str, device: str, keep: str) -> None:
    """What autograd saves is what cost.py says, and nothing else stays allocated behind its back."""
    dtype, autocast = TYPES[kind]
    ops = make_ops(CASES[name], kind, keep, device)
    leaves = {n: t.requires_grad_() for n, t in ops.inputs.params.items()}
    inputs = replace(ops.inputs, params=leaves)
    function = fused(CASES[name].spec().with_keep(keep))
    mode = torch.autocast(device, autocast) if autocast else contextlib.nullcontext()
    with mode:
        saved = saved_bytes(lambda: function(inputs), own=[*leaves.values(), *inputs.aux.values()])
    assert saved == cost.saved_bytes(ops.spec, *ops.dims, dtype)
    if device == "cpu":
        with mode:
            events = Events(lambda: function(inputs))
        assert events.live_bytes() - events.result.nbytes + inputs.x.nbytes == saved


@pytest.mark.parametrize("keep", KEEP_PRESETS)
@pytest.mark.parametrize(("name", "kind", "device"), RUNS_ON)
def test_peak_and_products(name: str, kind: str, device: str, keep: str) -> None:
    """One forward and one backward: the peak to the byte, every product by its shape, and which were replays."""
    ops = make_ops(CASES[name], kind, keep, device)
    forward = Events(ops.forward)
    made = cost.forward_products(ops.spec, *ops.dims)
    assert forward.count("ckptfused::attention_fwd") == ("attention" in made)

    backward = Events(lambda: ops.backward(forward.result[1:], ops.names))
    replayed = cost.replayed(ops.spec)
    assert backward.count("ckptfused::attention_fwd") == ("attention" in replayed)
    assert backward.count("ckptfused::attention_bwd") == ("attention" in made)
    if _products_are_seen(ops):
        assert forward.product_flops() == _flops(made.values())
        assert backward.product_flops() == 2 * _flops(made.values()) + _flops([made[n] for n in replayed])
        assert backward.products() == _shapes(ops.backward_work(ops.names))
    if device == "cpu":
        assert forward.peak_bytes() == ops.forward_scratch()
        assert backward.peak_bytes() == ops.backward_scratch(ops.names)


SMALL_OPS = ("norm", "residual", "activation", "qk")


@pytest.mark.parametrize("keep", ["inputs", "all"])
@pytest.mark.parametrize(("name", "kind"), RUNS)
def test_launches_and_results(name: str, kind: str, keep: str) -> None:
    """Every kernel call on the CPU by name, and what is still allocated in the end."""
    ops = make_ops(CASES[name], kind, keep)
    forward, backward = ops.ledgers()
    live = Events(ops.forward)
    check_launches(ops, live, forward)
    assert forward.live == sum(t.nbytes for t in live.result)
    kept = live.result[1:]
    live = Events(lambda: ops.backward(kept, ops.names))
    check_launches(ops, live, backward)
    assert backward.live == sum(t.nbytes for t in live.result)
    made = (forward.launches.total(), backward.launches.total())
    assert made == cost.launches(ops.spec, *ops.dims, ops.inputs.x.dtype, **ops.arguments)


def check_launches(ops: Ops, live: Events, ledger: cost.Ledger) -> None:
    for stem in SMALL_OPS:
        for op in (f"{stem}_fwd", f"{stem}_bwd"):
            assert ledger.launches[op] == live.count(f"ckptfused::{op}"), op
    stems = ("attention_fwd", "attention_bwd", "attention_tile_fwd", "attention_tile_bwd")
    attention = live.count(*(f"ckptfused::{stem}" for stem in stems))
    assert ledger.launches["flash attention"] + ledger.launches["tiled attention"] == attention
    assert ledger.launches["flash attention"] == live.count(ATTENTION, f"{ATTENTION}_backward")
    assert Counter((w.n, w.k, w.c) for w in ledger.work if isinstance(w, cost.Product)) == live.products()
    if ops.spec.compute is None and ops.inputs.x.dtype == torch.float32:  # else products go through float32 blocks
        assert ledger.launches["product"] == live.products().total()
        lengths = ops.inputs.aux.get("cu_seqlens")
        bounds = attention if lengths is not None and lengths.dtype == torch.int32 else 0  # converted at each use
        for op in ("aten::copy_", "aten::cat", "aten::sum", "aten::add_", "aten::mul_", "aten::zero_"):
            assert ledger.launches[op] + bounds * (op == "aten::copy_") == live.launches(op), op


FROZEN = [(name, "inputs") for name in ("llama", "post", "sandwich", "parallel", "shared", "attention", "ffn")]
FROZEN += [(name, keep) for name in ("adapters", "adapters-joint") for keep in ("inputs", "all")]


@on_devices
@pytest.mark.parametrize(("name", "keep"), [*FROZEN, ("sandwich", "all")])
def test_frozen_parts(name: str, keep: str, device: str) -> None:
    """Whatever subset of gradients is asked for: those products, that peak, and the flop counter says so."""
    ops = make_ops(CASES[name], keep=keep, device=device)
    kept = ops.forward()[1:]
    some = [[n] for n in ops.names] + [[n for n in ops.names if n[-2:] != "_w"], [*ops.names[1:]], [*ops.names[::2]]]
    some += [[n for n in ops.names if n.startswith(half)] for half in ("attn", "ffn")]
    some += [[n for n in ops.names if ".lora" in n], ["x", *(n for n in ops.names if ".lora" in n)]]
    for needs in some:
        events = Events(lambda needs=needs: ops.backward(kept, needs))
        if _products_are_seen(ops):
            assert events.products() == _shapes(ops.backward_work(needs)), needs
        work = cost.backward_work(ops.spec, *ops.dims, needs)
        assert sum(item.flops for item in work) == cost.backward_flops(ops.spec, *ops.dims, needs)
        if device == "cpu":
            assert events.peak_bytes() == ops.backward_scratch(needs), needs
        with FlopCounterMode(display=False) as counter:
            ops.backward(kept, needs)
        assert counter.get_total_flops() == cost.backward_flops(ops.spec, *ops.dims, needs), needs


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        ("x", "qkv attention proj gu | h gu o attention qkv |"),
        ("ffn.down_w", "qkv attention proj gu | | down"),
        ("ffn.down_b", "| |"),
        ("ffn.gate_w", "qkv attention proj gu | h | gate"),
        ("ffn.pre_w", "qkv attention proj gu | h gu |"),
        ("attn.o_w", "qkv attention proj gu | h gu | o"),
        ("attn.v_w", "qkv attention proj gu | h gu o attention | qkv"),
    ],
)
def test_frozen_parts_by_hand(needs: str, expected: str) -> None:
    """Replays | input gradients | weight gradients of a pre-norm block with joint weights that keeps nothing."""
    spec = BlockSpec(
        AttentionSpec(4, 2, 8, pre="rmsnorm", joint=True), FFNSpec("swiglu", 56, pre="rmsnorm", joint=True)
    )
    work = cost.backward_work(spec, 2, 33, 24, [needs.replace(".v_w", ".q_w")])
    replays = [w.name for w in work if w.name in ("qkv", "attention", "proj", "gu", "down")]
    inputs = {"d h": "h", "d in of ffn.gate": "gu", "d in of attn.o": "o", "attention backward": "attention"}
    into = [{**inputs, "d in of attn.q": "qkv"}[w.name] for w in work if w.name in {**inputs, "d in of attn.q": ""}]
    weights = {"d ffn.down_w": "down", "d ffn.gate_w": "gate", "d attn.o_w": "o", "d attn.q_w": "qkv"}
    made = [weights[w.name] for w in work if w.name in weights]
    assert " | ".join(" ".join(part) for part in (replays, into, made)).split() == expected.split()


@pytest.mark.parametrize("layout", ["pre", "post", "sandwich", "pre+out", "parallel", "shared", "attn", "ffn"])
def test_replayed(layout: str) -> None:
    """The closed form of what is replayed is what the walk through a backward finds, for every set of kept names."""
    spec = replace(LLAMA, layout=layout, mask="none" if layout == "ffn" else "causal").spec()
    names = keepable(spec)
    for keep in itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(len(names) + 1)):
        variant = spec.with_keep(keep)
        order = list(cost.forward_products(variant, 2, 33, 24))
        found = {work.name for work in cost.backward_work(variant, 2, 33, 24)} & set(order)
        assert cost.replayed(variant) == tuple(sorted(found, key=order.index)), keep


@on_devices
@pytest.mark.parametrize("keep", ["inputs", "all"])
@pytest.mark.parametrize("name", CASES)
def test_flop_counter(name: str, keep: str, device: str) -> None:
    ops = make_ops(CASES[name], keep=keep, device=device)
    with FlopCounterMode(display=False) as counter:
        y = fused(ops.spec)(replace(ops.inputs, x=ops.inputs.x.requires_grad_()))
        assert counter.get_total_flops() == cost.forward_flops(ops.spec, *ops.dims)
        y.backward(ops.inputs.dy)
    backward = cost.backward_flops(ops.spec, *ops.dims, needs=["x"])
    assert counter.get_total_flops() == cost.forward_flops(ops.spec, *ops.dims) + backward


TABLE = {  # preset: bytes per token; per cent of a training step's FLOPs replayed at T = 4k, 8k, 32k
    "inputs": (8192, 24.7, 25.0, 26.1),
    "mid": (16384, 22.4, 22.8, 24.6),
    "attention": (16512, 22.4, 20.7, 14.2),
    "attention+mid": (24704, 20.0, 18.5, 12.7),
    "attention+mid+qkv": (36992, 16.5, 15.2, 10.4),
    "all but attention": (73728, 5.9, 7.6, 14.2),
    "all but ffn": (36992, 16.5, 15.2, 10.4),
    "all": (94336, 0.0, 0.0, 0.0),
}


@pytest.mark.parametrize("keep", KEEP_PRESETS)
def test_table_of_llama_3_8b(keep: str) -> None:
    """The table of the cost derivation: bfloat16, causal attention counted as half."""
    attn = AttentionSpec(32, 8, 128, pre="rmsnorm", rope="half", causal=True)
    spec = BlockSpec(attn, FFNSpec("swiglu", 14336, pre="rmsnorm"), keep=KEEP_PRESETS["inputs"]).with_keep(keep)
    shares = []
    for length in (4096, 8192, 32768):
        made = cost.forward_products(spec, 1, length, 4096)
        work = {n: w.flops / (1 if isinstance(w, cost.Product) else 2) for n, w in made.items()}
        step = 3 * _flops(made.values()) + 3.5 * work["attention"]
        shares.append(round(100 * sum(work[n] for n in cost.replayed(spec)) / step, 1))
        assert cost.saved_bytes(spec, 1, length, 4096, torch.bfloat16) == TABLE[keep][0] * length
    assert tuple(shares) == TABLE[keep][1:]


_LONG_F, _LONG_N = replace(cases.LONG_F, width=8, tokens=40), replace(cases.LONG_N, width=8, tokens=450)
TILED = [
    pytest.param(_LONG_F, torch.float32, id="columns"),
    pytest.param(replace(_LONG_F, layout="sandwich", tokens=20, bias="all"), torch.float32, id="columns-sandwich"),
    pytest.param(replace(_LONG_N, bias="all"), torch.float32, id="rows"),
    pytest.param(replace(_LONG_F, lora="twice", weights="joint"), torch.float32, id="columns-adapters"),
    pytest.param(replace(_LONG_N, lora="drop", bias="all"), torch.float32, id="rows-adapters"),
    pytest.param(replace(_LONG_N, act="gelu", tokens=1101, keep="all"), torch.float32, id="rows-gelu-all"),
    pytest.param(replace(_LONG_N, tokens=1201), torch.bfloat16, id="rows-bfloat16"),
    pytest.param(replace(_LONG_F, tokens=61), torch.bfloat16, id="columns-bfloat16"),
]


_QUERIES = Case(mask="causal", rope="half", qk_norm="rmsnorm", tokens=300, heads="4/2", width=40, scratch=1 << 14)
QUERY_TILES: list[Any] = [
    pytest.param(_QUERIES, torch.float32, id="one"),
    pytest.param(replace(_QUERIES, batch=3, drop="all", keep="all"), torch.float32, id="batch-dropout-all"),
    pytest.param(replace(_QUERIES, seq_first=True, batch=2, keep="attention"), torch.float32, id="sequence-first"),
    pytest.param(
        replace(_QUERIES, seq_first=True, batch=2, rope="interleaved-batch", keep="attention"),
        torch.float32,
        id="tables-by-batch",
    ),
    pytest.param(replace(_QUERIES, qk_place="row", lora="drop", bias="all"), torch.float32, id="adapters"),
    pytest.param(replace(_QUERIES, qk_place="turned", layout="shared"), torch.float32, id="parallel"),
    pytest.param(
        replace(_QUERIES, mask="packed-causal", weights="interleaved", heads="2/2"), torch.float32, id="packed"
    ),
    pytest.param(replace(_QUERIES, layout="attn", mask="pad-keep"), torch.float32, id="attention-alone"),
    pytest.param(replace(_QUERIES, tokens=2000, width=64), torch.bfloat16, id="bfloat16"),
]


@pytest.mark.parametrize(("case", "dtype"), QUERY_TILES)
def test_peak_of_query_tiles(case: Case, dtype: torch.dtype) -> None:
    ops = Ops(case, case.spec(), make_inputs(case, dtype))
    forward = Events(ops.forward)
    backward = Events(lambda: ops.backward(forward.result[1:], ops.names))
    assert forward.count("ckptfused::attention_tile_fwd") > 3
    assert forward.peak_bytes() == ops.forward_scratch()
    assert backward.peak_bytes() == ops.backward_scratch(ops.names)
    assert backward.product_flops() == _flops(ops.backward_work(ops.names))
    if dtype == torch.float32:  # else products go through float32 blocks
        for live, ledger in zip((forward, backward), ops.ledgers(), strict=True):
            check_launches(ops, live, ledger)


def _llama_layer(scratch: int = 1 << 26, attn: dict[str, Any] | None = None, **ffn: Any) -> BlockSpec:
    """A layer of Llama-3-8B."""
    attention = {"causal": True, "rope": "half", "pre": "rmsnorm", **(attn or {})}
    return BlockSpec(
        attn=AttentionSpec(32, 8, 128, **attention),
        ffn=FFNSpec("swiglu", 14336, pre="rmsnorm", **ffn),
        scratch=scratch,
    )


def test_query_tiles_on_a_gpu_are_a_line_in_tokens() -> None:
    """The gradient of x, then k, v and what the kernel returns for them in half precision, and their sums in float32.
    The kernel returns those of the keys before the tile's end, in the last whole tile."""
    lengths = (1 << 17, 1 << 18, 1 << 19)
    peaks = []
    for length in lengths:
        ledger = cost.backward_ledger(_llama_layer(), 1, length, 4096, torch.bfloat16, needs=("x",), device="cuda")
        tiles = {work.length for work in ledger.work if isinstance(work, AttentionWork)}
        assert max(tiles) == 1152
        peaks.append(ledger.peak)
    x, keys = 4096 * 2, 1024 * (2 * 2 + 2 * 2 + 2 * 4)
    for (less, small), (more, large) in itertools.pairwise(zip(lengths, peaks, strict=True)):
        assert 0 <= large - small - (more - less) * (x + keys) <= 1152 * 4 * 1024


@pytest.mark.parametrize(
    ("scratch", "attn", "ffn", "dtype"),
    [
        (0, {}, {}, torch.bfloat16),
        (1 << 26, {"window": 512}, {}, torch.bfloat16),
        (1 << 26, {"softcap": 30.0}, {}, torch.bfloat16),
        (1 << 26, {"p_attn": 0.1}, {}, torch.bfloat16),
        (1 << 26, {"p_res": 0.1}, {}, torch.bfloat16),
        (1 << 26, {}, {"p_res": 0.1}, torch.bfloat16),
        (1 << 26, {"packed": True}, {}, torch.bfloat16),
        (1 << 26, {"mask": "keep"}, {}, torch.bfloat16),
        (1 << 26, {"padding": "keep"}, {}, torch.bfloat16),
        (1 << 26, {"scale": -1.0}, {}, torch.bfloat16),
        (1 << 26, {}, {}, torch.float32),
    ],
)
def test_where_a_gpu_takes_whole_calls(
    scratch: int, attn: dict[str, Any], ffn: dict[str, Any], dtype: torch.dtype
) -> None:
    """Tiles of queries are asked for by the scratch, and PyTorch's flash kernel has to make them."""
    spec = _llama_layer(scratch, attn, **ffn)
    ledger = cost.forward_ledger(spec, 1, 1 << 16, 4096, dtype, device="cuda")
    assert [w.length for w in ledger.work if isinstance(w, AttentionWork)] == [1 << 16]
    hidden = _llama_layer(1 << 26, p_hidden=0.1)
    found = cost.forward_ledger(hidden, 1, 1 << 16, 4096, torch.float16, device="cuda").work
    assert len([w for w in found if isinstance(w, AttentionWork)]) > 50


@pytest.mark.parametrize(("case", "dtype"), TILED)
def test_peak_of_tiles(case: Case, dtype: torch.dtype) -> None:
    ops = Ops(case, case.spec(), make_inputs(case, dtype))
    tokens = case.batch * case.tokens
    tiles = cost.ffn_tiles(tokens, case.width, case.hidden, case.act == "swiglu", dtype.itemsize, case.scratch)
    assert tiles != (tokens, case.hidden)
    forward = Events(ops.forward)
    assert forward.peak_bytes() == ops.forward_scratch()
    assert forward.live_bytes() == ops.inputs.x.nbytes + cost.kept_bytes(ops.spec, *ops.dims, dtype)
    backward = Events(lambda: ops.backward(forward.result[1:], ops.names))
    assert backward.peak_bytes() == ops.backward_scratch(ops.names)
    assert backward.product_flops() == _flops(ops.backward_work(ops.names))
    for live, ledger in zip((forward, backward), ops.ledgers(), strict=True):
        if dtype == torch.float32:  # else products go through float32 blocks
            check_launches(ops, live, ledger)


def test_less_scratch_holds_no_more() -> None:
    """Whether it cuts rows or columns: sums over rows are float32 only while they are added up."""
    peaks, cuts = [], set()
    for limit in (4096, 64, 16, 8, 4, 2):
        spec = ckptfused.FusedCheckpointBlock.llama(
            1024, 8, dim_feedforward=2816, device="meta", scratch=limit << 20
        ).spec()
        peaks.append(cost.backward_scratch(spec, 1, 8192, 1024, torch.bfloat16))
        cuts.add(cost.ffn_tiles(8192, 1024, 2816, True, 2, spec.scratch)[0] < 8192)
    assert peaks == sorted(peaks, reverse=True) and cuts == {True, False}


def test_peak_of_products_in_several_blocks() -> None:
    """Half-precision products beyond one float32 block a side."""
    case = replace(CASES["sandwich"], width=1040, hidden=1030, tokens=130)
    ops = make_ops(case, "autocast")
    forward = Events(ops.forward)
    assert forward.peak_bytes() == ops.forward_scratch()
    backward = Events(lambda: ops.backward(forward.result[1:], ops.names))
    assert backward.peak_bytes() == ops.backward_scratch(ops.names)
    assert backward.product_flops() == _flops(ops.backward_work(ops.names))


def test_scratch_on_a_gpu() -> None:
    """Attention with dropout at its backward, where the most is held: what the block has then, and Triton's rows."""
    batch, length, width, heads = 2, 64, 32, 4
    n, spec = batch * length, BlockSpec(attn=AttentionSpec(heads=heads, kv_heads=heads, head_dim=8, p_attn=0.1))
    rows = n * (3 * width + width + heads + width + 3 * width)  # qkv, o, lse, d o, and dq, dk, dv
    triton = 2 * heads * (n + 128 * batch)
    expected = 4 * (rows + width * width + triton)  # and the gradient of o_w
    params = dict.fromkeys(("attn.q_w", "attn.k_w", "attn.v_w", "attn.o_w"), torch.float32)
    dims = (batch, length, width, torch.float32)
    assert cost.backward_scratch(spec, *dims, params=params, device="cuda") == expected


@pytest.mark.parametrize("chosen", ["flash", "cudnn"])
@pytest.mark.parametrize(
    ("batch", "setting", "copies"), [(2, "off", 1), (2, "warn", 1), (2, "on", 17), (32, "on", 2), (33, "on", 1)]
)
def test_scratch_of_pytorchs_attention_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, batch: int, setting: str, copies: int, chosen: str
) -> None:
    """At its backward, as above. flash_api.cpp: repeatable, as many copies of dq as fill 132 multiprocessors. cuDNN: dq
    and a sum a row in float32; where repeatable gradients are asked for, it is flash."""
    monkeypatch.setattr(attention_cost, "attention_backend", partial(backend.attention_backend, override=chosen))
    monkeypatch.setattr(attention_cost, "multiprocessors", lambda: 132)
    torch.use_deterministic_algorithms(setting != "off", warn_only=setting == "warn")
    length, width, heads = 100, 64, 4
    n, spec = batch * length, BlockSpec(attn=AttentionSpec(heads=heads, kv_heads=heads, head_dim=16))
    rows = 2 * n * (3 * width + width + width + 3 * width) + 4 * n * heads  # qkv, o, d o, dq, dk, dv; lse
    flash, cudnn = 4 * batch * heads * 128 * (copies * 32 + 1), 4 * n * (width + heads)
    expected = rows + 2 * width * width + (flash if chosen == "flash" or setting == "on" else cudnn)
    params = dict.fromkeys(("attn.q_w", "attn.k_w", "attn.v_w", "attn.o_w"), torch.bfloat16)
    dims = (batch, length, width, torch.bfloat16)
    assert cost.backward_scratch(spec, *dims, params=params, device="cuda") == expected


def test_no_float_blocks_on_a_gpu() -> None:
    spec = BlockSpec(ffn=FFNSpec(hidden=64, act="gelu"))
    dims = (2, 64, 32, torch.float32)
    for scratch in (cost.forward_scratch, cost.backward_scratch):
        assert scratch(spec, *dims, device="cuda") == scratch(spec, *dims)
    assert cost.forward_scratch(spec, 2, 64, 32, torch.float16, device="cuda") == 2 * 128 * (64 + 32 + 32)
    # A processor may multiply in float16 itself, but has no sums of half-precision products in float32: tiles of rows.
    for device, blocks in (("cpu", True), ("cuda", False)):
        ledger = cost.backward_ledger(replace(spec, scratch=1 << 15), 2, 2048, 32, torch.float16, device=device)
        assert ("float32 blocks" in {event[1] for event in ledger.events}) == blocks


def test_launches_on_a_gpu() -> None:
    """By hand: a Llama block in the order of its forward; and what sums a norm's gradients, as one kernel more."""
    spec, dims = replace(LLAMA, tokens=4096, width=512).spec(), (1, 4096, 512, torch.bfloat16)
    params = {name: torch.bfloat16 for name, (_, must) in param_shapes(spec, 512).items() if must or "pre" in name}
    options: dict[str, Any] = {"params": params, "device": "cuda"}
    forward, backward = cost.forward_ledger(spec, *dims, **options), cost.backward_ledger(spec, *dims, **options)
    assert list(forward.launches.elements()) == [
        *("norm_fwd", *("product",) * 7, "qk_fwd", "attention_fwd", "residual_fwd", "activation_fwd")
    ]
    assert backward.launches["norm_bwd"] == 2 and backward.launches["sum_grads"] == 1
    assert backward.launches["product"] == 20
    sums = [event[3][1] for event in backward.events if event[1] == "partial sums of a norm's gradients"]
    assert sums == [4 * 512 * 512] * 2  # 4096 rows in chunks of eight; 132 multiprocessors have room for more


LLAMA_FORWARD = {
    "norm_fwd": 1,  # n1
    "product": 4,  # qkv, proj, gate and up, down
    "qk_fwd": 1,  # q's and k's heads together
    "attention_fwd": 1,
    "residual_fwd": 1,  # mid with n2; the down product adds to mid, which is y
    "activation_fwd": 1,
}
LLAMA_BACKWARD = {
    "norm_fwd": 1,  # n1, for the replay and for the gradient of qkv's weight
    "product": 3 + 2 * 4,  # of the replay, all but down; an input's and a weight's gradient of each
    "qk_fwd": 1,
    "attention_fwd": 1,
    "residual_fwd": 1,  # mid with n2
    "activation_bwd": 1,
    "qk_bwd": 1,  # q's and k's heads, and v's to their place beside them
    "norm_bwd": 2,
    "sum_grads": 1,  # of both norms, in their type
}


def test_launches_of_a_llama_block_on_a_gpu() -> None:
    """Every kernel of a forward and a backward that saved its input, in one piece and with joint weights, by hand."""
    size: dict[str, Any] = {"dim_feedforward": 14336, "num_kv_heads": 8, "keep": "inputs"}
    block = ckptfused.FusedCheckpointBlock.llama(4096, 32, **size, device="meta", dtype=torch.bfloat16)
    spec, call = block.spec(torch.bfloat16), (2, 8192, 4096, torch.bfloat16)
    assert spec.attn is not None
    attention = attention_cost.attention_cost(spec.attn, torch.bfloat16, 2, 8192, None, backward=True)[1]
    params = {name: torch.bfloat16 for name in param_shapes(spec, 4096) if not name.endswith("_b")}
    options: dict[str, Any] = {"params": params, "device": "cuda"}
    assert cost.forward_ledger(spec, *call, **options).launches == LLAMA_FORWARD
    assert cost.backward_ledger(spec, *call, **options).launches == LLAMA_BACKWARD | {"attention_bwd": attention}
    assert cost.launches(spec, *call, **options) == (9, 20 + attention)


@pytest.mark.parametrize(
    ("half", "wide", "p", "forward", "backward"),
    [
        (torch.bfloat16, torch.float32, 0.0, 46, 155),
        (torch.bfloat16, torch.bfloat16, 0.0, 36, 145),
        (torch.bfloat16, torch.float32, 0.05, 81, 259),
        (torch.bfloat16, torch.bfloat16, 0.05, 68, 240),
        (torch.float16, torch.float32, 0.0, 61, 190),
        (torch.float16, torch.float16, 0.0, 50, 179),
        (torch.float16, torch.float32, 0.05, 102, 306),
    ],
)
def test_launches_of_adapters_on_a_gpu(
    half: torch.dtype, wide: torch.dtype, p: float, forward: int, backward: int
) -> None:
    """An adapter beside each projection: in the forward two low-rank products where a float32 one is in halves, three
    kernels that make halves, one that joins them, one product; the backward has the replay of six of them, too. With
    dropout each has a gate and a copy of what is kept, that of the down projection in four parts. float16 has two
    scales of each rounded number and of each number beside it, and one of all adapters in float32.

    In float32 blocks of 4,096 rows it would be 141 and 398, with dropout 148 and 436.
    """
    attn = AttentionSpec(32, 8, 128, causal=True, pre="rmsnorm", rope="half")
    ffn = FFNSpec("swiglu", 14336, pre="rmsnorm")
    lora = partial(Adapter, rank=16, p=p)
    call = (2, 8192, 4096, half)

    def launches(spec: BlockSpec) -> tuple[int, int]:
        names = [n for n in param_shapes(spec, 4096) if not n.endswith(("_b", ".bias"))]
        params = {n: wide if ".lora" in n else half for n in names}
        needs = ["x", *(n for n in names if ".lora" in n)]
        return cost.launches(spec, *call, params=params, needs=needs, device="cuda")

    beside = BlockSpec(
        replace(attn, lora=tuple(map(lora, "qkvo"))), replace(ffn, lora=tuple(map(lora, ("gate", "up", "down"))))
    )
    with_them, without = launches(beside), launches(BlockSpec(attn, ffn))
    assert (with_them[0] - without[0], with_them[1] - without[1]) == (forward, backward)


@pytest.mark.parametrize(
    ("capability", "p", "name", "shared", "alone"),
    [((9, 0), 0.0, "cudnn", 5, 3), ((8, 0), 0.0, "flash", 5, 3), ((9, 0), 0.1, "triton", 3, 3)],
    ids=["H200", "A100", "dropout"],
)
def test_launches_of_attention_by_device(
    capability: tuple[int, int], p: float, name: str, shared: int, alone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel that a device would choose: PyTorch's sum dk and dv over the query heads of a key in two more."""
    monkeypatch.setattr(attention_cost, "capability_at_hand", lambda: capability)
    for kv_heads, launches in ((8, shared), (32, alone)):
        size: dict[str, Any] = {"dim_feedforward": 14336, "num_kv_heads": kv_heads, "attention_dropout": p}
        block = ckptfused.FusedCheckpointBlock.llama(4096, 32, **size, device="meta", dtype=torch.bfloat16)
        spec = block.spec(torch.bfloat16).attn
        assert spec is not None
        shape = backend.AttentionShape.of_spec(spec, torch.bfloat16, 2, 8192)
        assert backend.attention_backend(shape, capability)[0] == name
        cost_of = partial(attention_cost.attention_cost, spec, torch.bfloat16, 2, 8192, None)
        assert (cost_of(backward=False)[1], cost_of(backward=True)[1]) == (1, launches)


AS_ELSEWHERE = """
from tests.cost.test_cost import CASES, Events, make_ops
for name in ("adapters", "adapters-joint", "adapters-ffn"):
    for kind in ("float32", "bfloat16", "float16", "autocast"):
        ops = make_ops(CASES[name], kind)
        live = Events(ops.forward)
        assert live.peak_bytes() == ops.forward_scratch(), (name, kind)
        live = Events(lambda: ops.backward(live.result[1:], ops.names))
        assert live.peak_bytes() == ops.backward_scratch(ops.names), (name, kind)
"""


@pytest.mark.slow
def test_adapters_as_other_devices_have_them() -> None:
    """Through PyTorch's products, as on a GPU: the ledger has their temporaries to the byte."""
    done = forks.python(AS_ELSEWHERE, CKPTFUSED_ADAPTERS="aten")
    assert done.returncode == 0, done.stdout + done.stderr

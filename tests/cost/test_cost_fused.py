"""cost.py where one kernel makes the FFN's gate and up products and their activation: what a block allocates then.

Stand-ins that write nothing take the kernels' place on the CPU: only the block's own allocations are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from ckptfused import cost
from ckptfused._extension import _C
from ckptfused.cost import ledger
from tests.accounting import Events
from tests.cases import Case
from tests.cost.test_cost import CASES, LLAMA, Ops, make_ops

FUSED = {
    "llama": LLAMA,
    "joint-dropout": CASES["llama-joint-dropout"],
    "biases": replace(LLAMA, bias="all", transposed=True),
    "shared": CASES["shared"],
    "plain": Case(layout="ffn", act="relu2", bias="all", drop="hidden", batch=2, tokens=33),
}
_COLUMNS = Case(layout="ffn", act="swiglu", norm="rmsnorm", width=16, hidden=1728, tokens=30, scratch=1 << 18)
TILED = {
    "columns": _COLUMNS,
    "columns-joint": replace(_COLUMNS, weights="joint", bias="all"),
    "columns-plain": replace(_COLUMNS, act="relu2", tokens=50),
    "rows": replace(_COLUMNS, hidden=56, tokens=1201),
}
NEEDS = (None, ("x",), ("ffn.down_w",), ("ffn.down_b",), ("ffn.up_w",), ("ffn.pre_w",), ("x", "ffn.down_w"))
calls: list[str] = []
asked: list[tuple[Any, ...]] = []


def choice(like: torch.Tensor, *arguments: Any) -> str:
    asked.append(arguments)
    return "a tile"


@pytest.fixture(autouse=True)
def one_kernel() -> Iterator[None]:
    _C.forget_ffn_choices()
    library = torch.library.Library("ckptfused", "IMPL")
    library.impl("ffn_choice", choice, "CPU")
    for name in ("ffn_up_fwd", "ffn_up_bwd"):
        library.impl(name, lambda *_, name=name: calls.append(name), "CPU")
    calls.clear()
    asked.clear()
    yield
    library._destroy()
    _C.forget_ffn_choices()


def check(ops: Ops, tiles: int) -> None:
    forward = Events(ops.forward)
    assert forward.peak_bytes() == ops.forward_scratch()
    assert calls == ["ffn_up_fwd"] * tiles
    kept = forward.result[1:]
    for needs in (ops.names if needs is None else needs for needs in NEEDS):
        asked = [name for name in needs if name in ops.names]
        assert Events(lambda asked=asked: ops.backward(kept, asked)).peak_bytes() == ops.backward_scratch(asked), asked
    assert "ffn_up_bwd" in calls


@pytest.mark.parametrize("keep", ["inputs", "mid", "all"])
@pytest.mark.parametrize("kind", ["bfloat16", "autocast"])
@pytest.mark.parametrize("name", FUSED)
def test_peak(name: str, kind: str, keep: str) -> None:
    check(make_ops(FUSED[name], kind, keep), 1)


@pytest.mark.parametrize("keep", ["inputs", "all"])
@pytest.mark.parametrize("name", TILED)
def test_peak_of_tiles(name: str, keep: str) -> None:
    check(make_ops(TILED[name], "bfloat16", keep), 2)


@pytest.mark.parametrize(
    ("change", "kind"),
    [({}, "float32"), ({"layout": "sandwich"}, "bfloat16"), ({"layout": "pre+out"}, "bfloat16"),
     ({"lora": "all"}, "bfloat16"), ({"layout": "attn"}, "bfloat16")],
)  # fmt: skip
def test_blocks_that_keep_the_pointwise_kernel(change: dict[str, Any], kind: str) -> None:
    ops = make_ops(replace(LLAMA, **change), kind)
    forward = Events(ops.forward)
    assert forward.peak_bytes() == ops.forward_scratch()
    assert Events(lambda: ops.backward(forward.result[1:], ops.names)).peak_bytes() == ops.backward_scratch(ops.names)
    assert not calls


@pytest.mark.parametrize(
    ("one", "forward", "backward"),
    [  # in units of N × 16 elements, where C = 32, F = 48 and N = 64
        (
            True,
            2 + 3,
            (2 + 3 + 6 + 1.5, 2 + 6 + 1.5 + 2 + 3),
        ),  # n2, h | n2, h, dgu, d down_w; then dn2, d gate_w, d up_w
        (False, 6 + 3, (2 + 6 + 3 + 1.5, 2 + 6 + 1.5 + 2 + 3)),  # gu, h | the same: gu's buffer serves dgu
    ],
)
def test_by_hand_on_a_gpu(
    one: bool, forward: float, backward: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "_device_that_chooses", lambda _: "cpu" if one else None)
    spec = replace(LLAMA, layout="ffn", mask="none", hidden=48).spec()
    dims, needs = (1, 64, 32, torch.bfloat16), ("x", "ffn.gate_w", "ffn.up_w", "ffn.down_w")
    params = dict.fromkeys(needs[1:], torch.bfloat16) | {"ffn.pre_w": torch.bfloat16}
    unit = 2 * 64 * 16
    assert cost.forward_scratch(spec, *dims, params=params, device="cuda") == unit * forward
    assert cost.backward_scratch(spec, *dims, needs=needs, params=params, device="cuda") == unit * max(backward)


def test_the_choice_is_asked_for_as_the_block_does() -> None:
    """And once: what Python answered is known until tuning says otherwise."""
    ops = make_ops(LLAMA, "autocast")
    ops.forward()
    ops.forward()
    _C.forget_ffn_choices()
    ops.forward_scratch()
    of_block, of_cost = asked
    assert of_block == of_cost and of_block[:3] == (torch.bfloat16, 66, LLAMA.width)

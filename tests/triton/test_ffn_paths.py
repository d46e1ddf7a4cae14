"""What tune_ffn measures is what a block calls: the same kernels, tile by tile, on the same sizes and strides.

Nothing is multiplied by Triton here: stand-ins in the place of its kernels write down what they are called with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

pytest.importorskip("triton")

from ckptfused import cost
from ckptfused.cost.tiles import cut
from ckptfused.triton import ffn_paths
from ckptfused.triton.ffn_configs import FFNConfig
from ckptfused.triton.ffn_paths import FORWARD, KEEPING, KEPT, PATHS, REPLAYING, by_path, make_operands, make_views
from tests.cases import Case
from tests.cost.test_cost import Ops
from tests.oracle import make_inputs

CONFIG = FFNConfig(16, 16, 16, 1, 1)
BASE = Case(layout="ffn", norm="rmsnorm", weights="joint", width=16)
# The limit above which an FFN is cut is a constant of the extension, hence the lengths.
COLUMNS = replace(BASE, hidden=44736, tokens=1100)
CASES = {
    "whole": replace(BASE, hidden=64, tokens=70),
    "columns": COLUMNS,
    "rows": replace(BASE, hidden=704, tokens=64100),
    "columns-plain": replace(COLUMNS, act="relu2", tokens=1700),
}
TILES = {"whole": 1, "columns": 2, "rows": 2, "columns-plain": 2}
# Of a block that keeps that much: its forward and its backward.
STEPS = {"inputs": (FORWARD, REPLAYING), "all": (KEEPING, KEPT)}


def described(arguments: Iterable[Any]) -> list[Any]:
    """The sizes and strides of tensors; the rest as it is."""
    return [(tuple(a.shape), a.stride(), a.dtype) if isinstance(a, Tensor) else a for a in arguments]


def views_of(case: Case, dtype: torch.dtype) -> list[ffn_paths.Views]:
    views = make_views(make_operands(case.tokens, case.width, case.hidden, case.act, dtype, "cpu"))
    gated = case.act == "swiglu"
    rows, cols = cost.ffn_tiles(case.tokens, case.width, case.hidden, gated, dtype.itemsize)
    assert views[0].tile == (0, rows, 0, cols)
    return views


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Of Triton's kernels, from a block on the CPU or from the tuner."""
    found: list[Any] = []
    library = torch.library.Library("ckptfused", "IMPL")
    library.impl("ffn_choice", lambda *_: CONFIG.name, "CPU")
    for name in ("ffn_up_fwd", "ffn_up_bwd"):

        def write_down(*arguments: Any, name: str = name) -> None:
            found.append([name, *described(arguments)])

        library.impl(name, write_down, "CPU")
        monkeypatch.setattr(ffn_paths, name, write_down)
    yield found
    library._destroy()


def block_step(case: Case, dtype: torch.dtype, keep: str) -> Callable[[], None]:
    ops = Ops(case, case.spec().with_keep(keep), make_inputs(case, dtype))

    def step() -> None:
        ops.backward(ops.forward()[1:], ops.names)

    return step


@pytest.mark.parametrize("keep", STEPS)
@pytest.mark.parametrize("name", CASES)
def test_triton(name: str, keep: str, calls: list[Any]) -> None:
    case = CASES[name]
    block_step(case, torch.bfloat16, keep)()
    of_block = calls[:]
    calls.clear()
    runs = by_path(ffn_paths.triton_tile(v, case.act, CONFIG) for v in views_of(case, torch.bfloat16))
    for path in STEPS[keep]:
        for run in runs[path]:
            run()
    assert calls == of_block
    assert [call[0] for call in calls] == ["ffn_up_fwd"] * TILES[name] + ["ffn_up_bwd"] * TILES[name]


SEEN = ("aten::mm", "aten::copy_", "ckptfused::activation_fwd", "ckptfused::activation_bwd")


def operations(function: Callable[[], None]) -> list[Any]:
    """Products, copies and pointwise kernels in their order, with the sizes and strides of their tensors."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True) as prof:
        function()
    found: list[Any] = []

    def read(events: Iterable[Any]) -> None:
        for event in events:
            if event.name in SEEN:
                tensors = [t for t in event.extra_fields.inputs if hasattr(t, "strides")]
                found.append((event.name, *((tuple(t.sizes), tuple(t.strides)) for t in tensors)))
            read(event.children)

    read(sorted(prof.profiler.kineto_results.experimental_event_tree(), key=lambda event: event.start_time_ns))
    return found


def _within(part: Sequence[Any], whole: Sequence[Any]) -> bool:
    rest = iter(whole)
    return all(item in rest for item in part)


@pytest.mark.parametrize("keep", STEPS)
@pytest.mark.parametrize("name", CASES)
def test_cublas(name: str, keep: str) -> None:
    """In float32, where a product on the CPU is one call as on a GPU; the block makes others in between."""
    case = CASES[name]
    runs = by_path(ffn_paths.cublas_tile(v, case.act) for v in views_of(case, torch.float32))

    def step() -> None:
        for path in STEPS[keep]:
            for run in runs[path]:
                run()

    of_tuner, of_block = operations(step), operations(block_step(case, torch.float32, keep))
    assert _within(of_tuner, of_block)
    kernels = [op for op in of_tuner if op[0].startswith("ckptfused::")]
    assert kernels == [op for op in of_block if op[0].startswith("ckptfused::activation")]
    # Whether gu is copied to where it stays, too.
    assert sum(op[0] == "aten::copy_" for op in of_tuner) == sum(op[0] == "aten::copy_" for op in of_block)


def test_every_path_is_there() -> None:
    views = views_of(CASES["whole"], torch.bfloat16)
    for tiles in (ffn_paths.cublas_tile(views[0], "swiglu"), ffn_paths.triton_tile(views[0], "swiglu", CONFIG)):
        assert tuple(tiles) == PATHS


def test_llama_goes_in_six_tiles() -> None:
    tiles = cut(16384, 14336, cost.ffn_tiles(16384, 4096, 14336, True, 2))
    assert tiles == [(0, 16384, col, min(2432, 14336 - col)) for col in range(0, 14336, 2432)]
    assert len(tiles) == 6

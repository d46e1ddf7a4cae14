"""The Triton FFN products on a GPU: alone against plain PyTorch, and inside blocks that are made to choose them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from ckptfused.spec import keepable
from ckptfused.triton import tuning
from ckptfused.triton.ffn import launch
from ckptfused.triton.ffn.configs import CANDIDATES, FFNConfig, candidates
from tests.cases import Case
from tests.devices import repeatable
from tests.gpu import test_graphs as graphs
from tests.gpu import test_keep as keep
from tests.oracle import expect, fused, make_inputs, masks_of, rng_state, run
from tests.triton import ffn_calls
from tests.triton.ffn_calls import Call
from tests.triton.interpreted import test_ffn_block as blocks

pytestmark = pytest.mark.gpu


def tiles() -> tuple[FFNConfig, ...]:
    return candidates(torch.cuda.get_device_capability())


# Every case is another kernel: compiled with the last tile, which takes a third of the time that the first does.
@pytest.mark.parametrize("call", ffn_calls.cases(), ids=lambda call: call.id)
def test_against_pytorch(call: Call) -> None:
    ffn_calls.check_all(replace(call, config=tiles()[-1].name), "cuda", alone=False)


@pytest.mark.parametrize("call", [Call(p=0.3), Call(act="gelu")], ids=lambda call: call.id)
def test_each_output_alone(call: Call) -> None:
    ffn_calls.check_all(replace(call, config=tiles()[-1].name), "cuda")


@pytest.mark.parametrize("index", range(max(map(len, CANDIDATES.values()))))
def test_every_tile(index: int) -> None:
    """Sizes of several tiles, the last of them cut."""
    if index >= len(tiles()):
        pytest.skip("fewer tiles for this GPU")
    ffn_calls.check_all(Call(n=300, c=208, f=336, p=0.1, config=tiles()[index].name), "cuda", alone=False)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_mask_is_the_oracles(p: float) -> None:
    ffn_calls.check_mask(p, "cuda")


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every block of half precision goes through the Triton kernels, with the first tile; the calls that it makes."""
    calls: list[str] = []

    def counted(kernel: Callable[..., None]) -> Callable[..., None]:
        def call(*args: object, **options: object) -> None:
            calls.append(kernel.__name__)
            kernel(*args, **options)

        return call

    for kernel in (launch.ffn_up_fwd, launch.ffn_up_bwd):
        monkeypatch.setattr(launch, kernel.__name__, counted(kernel))
    monkeypatch.setattr(tuning, "override", lambda: "triton")
    return calls


@pytest.fixture
def quickly(chosen: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Likewise, with the last tile."""
    monkeypatch.setattr(tuning, "candidates", lambda capability: candidates(capability)[-1:])
    return chosen


# The kernels are for widths that are multiples of 16.
BLOCKS = [replace(case, width=48, hidden=112) for case in blocks.CASES]


@pytest.mark.parametrize("case", BLOCKS, ids=lambda case: case.id)
def test_a_block_against_the_oracle(case: Case, quickly: list[str]) -> None:
    inputs, spec = make_inputs(case, torch.bfloat16, device="cuda"), case.spec()
    got = run(fused(spec), inputs)
    assert quickly == ["ffn_up_fwd", "ffn_up_bwd"]
    expect(spec, inputs, rng_state(inputs.x)).check(got)


@pytest.mark.parametrize("case", BLOCKS, ids=lambda case: case.id)
def test_what_is_kept_changes_no_bit(case: Case, quickly: list[str]) -> None:
    repeatable("cuda")
    inputs, spec = make_inputs(case, torch.bfloat16, device="cuda"), case.spec()
    expected = run(fused(spec.with_keep(())), inputs)
    for names in [*((name,) for name in keepable(spec)), keepable(spec)]:
        got = run(fused(spec.with_keep(names)), inputs)
        assert not [name for name, t in expected.items() if not torch.equal(got[name], t)], names
    assert len(quickly) == 2 * (2 + len(keepable(spec)))


# As tests/cases.py has them, with widths that the kernels are for: tiles of columns, tiles of rows.
TILED = [
    Case(layout="ffn", drop="hidden", width=32, hidden=44736, tokens=1203, scratch=256 << 20),
    Case(layout="ffn", drop="hidden", width=32, hidden=704, tokens=64001, scratch=256 << 20),
]


@pytest.mark.parametrize("case", TILED, ids=lambda case: case.id)
def test_tiles_of_a_block(case: Case, quickly: list[str]) -> None:
    inputs, spec = make_inputs(case, torch.bfloat16, device="cuda"), case.spec()
    got = run(fused(spec), inputs)
    assert min(quickly.count(name) for name in ("ffn_up_fwd", "ffn_up_bwd")) > 1
    expect(spec, inputs, masks=masks_of(spec, inputs, rng_state(inputs.x), slow=False)).check(got)


def test_presets_are_equal_at_the_sizes_of_a_model(chosen: list[str]) -> None:
    """The tile is the one that a model would get."""
    keep.test_presets_are_equal("dropout everywhere")
    assert {"ffn_up_fwd", "ffn_up_bwd"} == set(chosen)


def test_replays_of_a_graph_draw_anew(quickly: list[str]) -> None:
    graphs.test_replays_draw_anew_and_agree_with_eager("inputs", torch.bfloat16)
    assert {"ffn_up_fwd", "ffn_up_bwd"} == set(quickly)

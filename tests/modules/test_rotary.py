"""One rotary table for all modules that read the same, found at the call by the tensor's device and type."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ckptfused import FusedCheckpointAttention, FusedCheckpointBlock
from ckptfused.modules import RotaryTable, rotary
from tests.cases import by_turns
from tests.devices import on_devices

C, H, T = 32, 4, 7


def llama(theta: float = 1e4, **options: Any) -> FusedCheckpointBlock:
    return FusedCheckpointBlock.llama(C, H, 64, rope_theta=theta, **options)


def tables_of(block: FusedCheckpointBlock, x: Tensor) -> tuple[Tensor, Tensor]:
    table: Any = block.self_attn.rotary
    return table(x.size(1), x)


def live(theta: float) -> list[Any]:
    gc.collect()
    return [key for key in rotary._tables if key.theta == theta]


@pytest.fixture
def fills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the tables that are computed to be stored."""
    found: list[int] = []
    stored = rotary._stored
    monkeypatch.setattr(rotary, "_stored", lambda key, length: found.append(length) or stored(key, length))
    return found


@on_devices
def test_values_growth_and_precision(device: str, fills: list[int]) -> None:
    table, x = RotaryTable(8, 123.0), torch.empty(1, device=device)
    cos, sin = table(600, x)
    assert cos.shape == sin.shape == (600, 4)
    assert fills == [512, 1024]
    angle = torch.tensor(599 * 123.0 ** (-2 / 8), dtype=torch.float64)
    torch.testing.assert_close(cos[599, 1].cpu(), angle.cos().float(), rtol=0, atol=1e-7)
    torch.testing.assert_close(sin[599, 1].cpu(), angle.sin().float(), rtol=0, atol=1e-7)
    assert table(5, x.half())[0].data_ptr() == cos.data_ptr()
    assert table(5, x.double())[0].dtype == torch.float64
    assert all(map(torch.equal, table(5), RotaryTable(8, 123.0)(5, torch.empty(0))))
    assert not table.state_dict() and not list(table.buffers())


def test_blocks_share_it_and_free_it() -> None:
    theta = 1234.0
    blocks = [llama(theta) for _ in range(3)]
    blocks.append(copy.deepcopy(blocks[0]))
    blocks.append(pickle.loads(pickle.dumps(blocks[0])))
    x = torch.randn(1, 600, C)
    for block in blocks:
        block(x)
    assert len({t.data_ptr() for block in blocks for t in tables_of(block, x)}) == 2
    assert len(live(theta)) == 1
    del block, blocks[1:]
    assert len(live(theta)) == 1
    blocks[0].double()(x.double())
    assert [key.dtype for key in live(theta)] == [torch.float64]
    blocks.clear()
    assert not live(theta)


def test_a_table_given_to_several_blocks() -> None:
    table = RotaryTable(8, 77.0)
    first, second = (FusedCheckpointAttention(C, H, rope=table) for _ in range(2))
    assert first.self_attn.rotary is second.self_attn.rotary is table
    x = torch.randn(T, 1, C)
    second.double()
    first(x)
    second(x.double())
    assert {key.dtype for key in live(77.0)} == {torch.float32, torch.float64}


def test_made_on_meta_then_assigned() -> None:
    block, x = llama(), torch.randn(2, T, C)
    with torch.device("meta"):
        empty = llama()
    empty.load_state_dict(block.state_dict(), assign=True)
    assert torch.equal(empty(x), block(x))
    with torch.device("meta"):
        empty = llama()
    empty.to_empty(device="cpu").load_state_dict(block.state_dict())
    assert torch.equal(empty(x), block(x))
    assert llama(device="meta")(x.to("meta")).is_meta


def test_fake_tensors_leave_nothing_behind(fills: list[int]) -> None:
    with FakeTensorMode():
        block, x = llama(4321.0), torch.randn(2, 600, C)
        assert isinstance(block(x), FakeTensor)
    assert isinstance(block(x), FakeTensor)
    assert not fills


def test_made_in_inference_mode() -> None:
    block = llama(333.0)
    with torch.inference_mode():
        block(torch.zeros(1, 600, C))
    block(torch.zeros(1, 600, C, requires_grad=True)).sum().backward()


def test_made_under_a_transform_of_torch_func() -> None:
    table = RotaryTable(8, 334.0)

    def turned(x: Tensor) -> Tensor:
        return (x * table(3, x)[0]).sum()

    torch.func.vmap(torch.func.grad(turned))(torch.ones(2, 3, 4))
    assert torch.equal(table(3, torch.ones(1))[0][0], torch.ones(4))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.extended)])
def test_compiled_blocks_share_it(backend: str, fills: list[int]) -> None:
    torch._dynamo.reset()
    theta = 5000.0 + len(backend)
    model, x = nn.Sequential(*(llama(theta) for _ in range(3))), torch.randn(2, T, C, requires_grad=True)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    found = torch.autograd.grad(compiled(x).sum(), x)
    torch.testing.assert_close(found, torch.autograd.grad(model(x).sum(), x))
    each = [torch.compile(block, backend=backend, fullgraph=True) for block in model]
    for block in each:
        block(x)
    assert fills == [512]
    long = torch.randn(2, 600, C)
    y = compiled(long)  # a graph for any length, for which there is a longer table
    assert fills == ([512, 32768] if torch.__version__ >= (2, 12) else [512])  # 2.11 takes all graphs for exported
    torch.testing.assert_close(y, model(long))


@pytest.mark.parametrize(("style", "marked"), by_turns(["half", "interleaved"], [False, True]))
def test_one_graph_for_every_length(style: str, marked: bool) -> None:
    torch._dynamo.reset()
    block, counter = llama(rope_style=style), CompileCounter()
    compiled = torch.compile(block, backend=counter, fullgraph=True, dynamic=None if marked else True)
    for length in (33, 20, 47, 11, 64, 90, 7, 100, 120, 511, 512, 513, 1100, 700):
        x = torch.randn(1, length, C)
        if marked:
            torch._dynamo.mark_dynamic(x, 1)
        torch.testing.assert_close(compiled(x), block(x))
    assert counter.frame_count == 1


@pytest.mark.parametrize("strict", [False, True])
def test_exported_for_every_length(strict: bool) -> None:
    torch._dynamo.reset()
    block, length = llama(dropout=0.0).eval(), torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(block, (torch.randn(2, T, C),), dynamic_shapes=({1: length},), strict=strict)
    module = program.module()
    for length in (2, T + 1, 512, 513, 1500):
        x = torch.randn(2, length, C)
        torch.testing.assert_close(module(x), block(x))


@pytest.mark.slow
def test_compiled_with_dynamic_shapes_and_other_thetas() -> None:
    torch._dynamo.reset()
    for theta in (1e4, 5e5):
        block = llama(theta)
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
        for length in (5, 9, 600):
            x = torch.randn(1, length, C)
            torch.testing.assert_close(compiled(x), block(x))


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict: bool) -> None:
    torch._dynamo.reset()
    block, x = llama(dropout=0.0).eval(), torch.randn(2, T, C)
    program = torch.export.export(block, (x,), strict=strict)
    torch.testing.assert_close(program.module()(x), block(x))


def test_threads_grow_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second thread waits for the longer table of the first, rather than putting a shorter one in its place."""
    table, like = RotaryTable(8, 6789.0), torch.empty(1)
    expected = rotary._computed(rotary._Key(8, 6789.0, torch.float32, like.device), 4100, like)
    table(4, like)
    stored, asked, begun, go = rotary._stored, [], threading.Event(), threading.Event()

    def slow(key: Any, length: int) -> Any:
        asked.append(length)
        begun.set()
        assert go.wait(30)
        return stored(key, length)

    monkeypatch.setattr(rotary, "_stored", slow)
    found: dict[int, tuple[Tensor, Tensor]] = {}
    threads = [threading.Thread(target=lambda n=n: found.update({n: table(n, like)})) for n in (4100, 700)]
    threads[0].start()
    assert begun.wait(30)
    threads[1].start()
    threads[1].join(0.2)
    assert table(512, like)[0].size(0) == 512  # what is there needs no lock
    go.set()
    for thread in threads:
        thread.join()
    assert asked == [8192]
    for length, pair in found.items():
        assert all(torch.equal(a, b[:length]) for a, b in zip(pair, expected, strict=True))


def test_a_table_that_a_graph_reads_outlives_a_longer_one() -> None:
    """What a capture asks for, without a GPU: the memory that a CUDA graph reads stays."""
    key = rotary._Key(8, 42.0, torch.float32, torch.device("cpu"))
    table = rotary._Table(key)
    read = table.for_capture(100)
    assert read is not None and table.for_capture(50) is not None
    assert table.for_capture(513) is None  # computed during capture, in the graph's own memory
    table.reaching(1000)
    assert table.pair is not read
    assert len(table.captured) == 1 and table.captured[0] is read


def test_modules_saved_with_tables_of_their_own_load() -> None:
    table = RotaryTable(8, 500.0)
    state = {**vars(table), "_buffers": {"cos": torch.zeros(4, 4), "sin": torch.zeros(4, 4)}}
    state["_non_persistent_buffers_set"] = {"cos", "sin"}
    del state["_read"]
    old = RotaryTable.__new__(RotaryTable)
    old.__setstate__(state)
    assert not list(old.buffers())
    assert torch.equal(old(9, torch.empty(1))[0], table(9, torch.empty(1))[0])
    assert "cos" not in old.state_dict()

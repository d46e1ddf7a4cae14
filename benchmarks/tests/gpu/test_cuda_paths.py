"""What only a GPU runs of the measurements, with a stand-in for torch.cuda: that its calls are there and in order."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from benchmarks.gpu import block, goals, graphs, models, timing


class Allocator:
    """Bytes as a step would leave them: so much more at each reading."""

    def __init__(self) -> None:
        self.now, self.calls = 0, []  # type: ignore[var-annotated]

    def allocated(self) -> int:
        self.calls.append("allocated")
        self.now += 1000
        return self.now

    def reset(self) -> None:
        self.calls.append("reset")

    def most(self) -> int:
        self.calls.append("most")
        return self.now + 5000


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    found = Allocator()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: found.calls.append("wait"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", found.allocated)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", found.reset)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", found.most)
    return found


def test_memory_of_a_variant(allocator: Allocator) -> None:
    """Held: what is there after the forward, without y, with x; the peak: above what was there before."""
    variants = block.Variants(block.TINY, "cpu")
    for name in ("ckptfused inputs", "eager", "eager checkpoint pinned"):
        allocator.calls.clear()
        used = variants.memory(name)
        assert used == {"saved": 1000, "peak": 6000}
        assert allocator.calls == ["wait", "allocated", "reset", "allocated", "most"]


def test_memory_of_a_model(allocator: Allocator) -> None:
    used = models.peak(lambda: allocator.calls.append("step"), "cuda")
    assert used == {"state": 1000, "peak": 6000}
    assert allocator.calls == ["wait", "reset", "allocated", "step", "wait", "most"]


def test_a_graph_is_captured_after_three_steps_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Stream:
        def wait_stream(self, other: Any) -> None:
            calls.append("wait")

    class Graph:
        def replay(self) -> None:
            calls.append("replay")

    @contextlib.contextmanager
    def within(name: str) -> Any:
        calls.append(f"{name} begins")
        yield
        calls.append(f"{name} ends")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: within("stream"))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: within("graph"))
    replay = graphs.captured(lambda: calls.append("step"), "cuda")
    begun = ["wait", "stream begins", *["step"] * graphs.WARM, "stream ends", "wait"]
    assert calls == [*begun, "graph begins", "step", "graph ends"]
    replay()
    assert calls[-1] == "replay"


def test_a_call_is_timed_between_two_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the cache was read and the GPU has something to wait for."""
    calls: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("wait")

        def elapsed_time(self, other: Event) -> float:
            return 2.5

    properties = type("Properties", (), {"L2_cache_size": 1 << 10})
    zeros = torch.zeros
    monkeypatch.setattr(timing.torch, "zeros", lambda size, dtype, device: zeros(16, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: calls.append("sleep"))
    times = timing.Clock("cuda").compare({"one": lambda: calls.append("call")}, 0, rounds=3)["one"]
    assert times == timing.Times(2.5, 2.5, 2.5, 3)
    assert calls[:5] == ["sleep", "record", "call", "record", "wait"]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA T4", None),
    ],
)
def test_rates_are_found_by_the_gpus_name(name: str, known: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    device = goals.device_at_hand("cuda")
    assert (device and device.name) == known

"""Backward computes under the settings of its forward, whatever holds when it runs, and leaves the caller's as found.

The bits of a matrix product depend on the number of threads, on the precision of float32 products and on the libraries
that are allowed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import ckptfused
from ckptfused import FusedCheckpointBlock, FusedCheckpointSequential
from ckptfused.ops import numerics
from tests.cases import AXES, Case
from tests.oracle import fused, make_inputs

# Products whose few results are long sums: libraries split those among many threads, wherever these tests ran.
TOKENS, WIDTH = 33, 4096
CASE = Case(act="swiglu", norm="rmsnorm", rope="half", heads="3/1", mask="causal", drop="all", bias="all", lora="all")
CASE = replace(CASE, tokens=TOKENS, width=WIDTH, hidden=40, head_dim=8)
OTHERS = ("post", "sandwich", "parallel", "attn", "ffn")
THREADS = "four threads, then one"


def _flush(on: bool) -> None:
    if not torch.set_flush_denormal(on):
        pytest.skip("this processor cannot flush subnormals")


def _onednn(on: bool) -> None:
    torch.backends.mkldnn.enabled = on


def _bf16_for_all(on: bool) -> None:
    torch.backends.fp32_precision = "bf16" if on else "none"


# How each is set, in forward and then between forward and backward.
CHANGES: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "one thread, then four": (lambda: torch.set_num_threads(1), lambda: torch.set_num_threads(4)),
    "four threads, then one": (lambda: torch.set_num_threads(4), lambda: torch.set_num_threads(1)),
    "two threads, then three": (lambda: torch.set_num_threads(2), lambda: torch.set_num_threads(3)),
    "highest, then medium": (
        lambda: torch.set_float32_matmul_precision("highest"),
        lambda: torch.set_float32_matmul_precision("medium"),
    ),
    "medium, then highest": (
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: torch.set_float32_matmul_precision("highest"),
    ),
    "bf16 for all, then none": (lambda: _bf16_for_all(True), lambda: _bf16_for_all(False)),
    "oneDNN, then none": (lambda: _onednn(True), lambda: _onednn(False)),
    "subnormals flushed, then not": (lambda: _flush(True), lambda: _flush(False)),
}


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    _bf16_for_all(False)
    torch.set_float32_matmul_precision(precision)
    torch.backends.mkldnn.enabled = True
    torch.set_flush_denormal(False)
    torch.set_num_threads(threads)


def _elsewhere(work: Callable[[], object]) -> None:
    """In a thread of its own, whose settings are those of a thread that starts."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def _gradients(
    case: Case, dtype: torch.dtype, keep: str, first: Callable[[], object], then: Callable[[], object]
) -> list[Tensor]:
    inputs = make_inputs(case, dtype)
    leaves = [t.requires_grad_() for t in (inputs.x, *inputs.params.values())]
    first()
    y = fused(case.spec().with_keep(keep))(inputs)
    then()
    between = numerics.current()
    grads = torch.autograd.grad(y, leaves, inputs.dy)
    assert numerics.current() == between
    return [y.detach(), *grads]


def _equal(got: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(("change", "layout"), [*((c, "pre") for c in CHANGES), *((THREADS, o) for o in OTHERS)])
def test_a_change_between_forward_and_backward(change: str, layout: str, dtype: torch.dtype) -> None:
    case = replace(CASE, layout=layout, drop={"attn": "res", "ffn": "hidden"}.get(layout, "all"))
    first, then = CHANGES[change]
    expected = _gradients(case, dtype, "all", first, lambda: None)
    for keep in AXES["keep"] if layout == "pre" else ("inputs", "all"):
        assert _equal(_gradients(case, dtype, str(keep), first, then), expected), keep


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
def test_backward_in_a_thread_with_a_count_of_its_own(dtype: torch.dtype) -> None:
    expected = _gradients(CASE, dtype, "all", lambda: torch.set_num_threads(4), lambda: None)
    inputs = make_inputs(CASE, dtype)
    leaves = [t.requires_grad_() for t in (inputs.x, *inputs.params.values())]
    y = fused(CASE.spec())(inputs)
    results = [y.detach()]

    def backward() -> None:
        torch.set_num_threads(1)
        results.extend(torch.autograd.grad(y, leaves, inputs.dy))
        assert torch.get_num_threads() == 1

    _elsewhere(backward)
    assert torch.get_num_threads() == 4
    assert _equal(results, expected)


def test_threads_that_start_meanwhile_keep_the_callers_count() -> None:
    """at::set_num_threads would tell them another."""
    torch.set_num_threads(2)
    seen: list[int] = []
    three = list(numerics.current())
    three[0] = 3
    with numerics.under(tuple(three)):
        assert torch.get_num_threads() == 3
        _elsewhere(lambda: seen.append(torch.get_num_threads()))
    assert seen == [2] and torch.get_num_threads() == 2


@pytest.mark.parametrize("change", CHANGES)
def test_segments(change: str) -> None:
    torch.manual_seed(0)
    options = {"num_kv_heads": 1, "head_dim": 8, "dropout": 0.1}
    blocks = [FusedCheckpointBlock.llama(WIDTH, 3, 40, **options) for _ in range(3)]
    x, first, then = torch.randn(1, TOKENS, WIDTH), *CHANGES[change]

    def gradients(module: torch.nn.Module, then: Callable[[], object]) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        torch.manual_seed(1)
        first()
        y = module(leaf)
        then()
        between = numerics.current()
        grads = torch.autograd.grad(y.square().sum(), (leaf, *module.parameters()))
        assert numerics.current() == between
        return list(grads)

    expected = gradients(torch.nn.Sequential(*blocks), lambda: None)
    assert _equal(gradients(FusedCheckpointSequential(*blocks), then), expected)


@pytest.mark.parametrize("change", CHANGES)
def test_generic_replays(change: str) -> None:
    """A replay agrees with PyTorch's backward of values that were kept, which itself computes under what holds when it
    runs.
    """
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, 33), torch.nn.GELU(), torch.nn.Linear(33, WIDTH)]
    model, x = torch.nn.Sequential(*layers), torch.randn(TOKENS, WIDTH)
    first, then = CHANGES[change]

    def gradients(replayed: bool) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        first()
        y = ckptfused.checkpoint(model, leaf) if replayed else model(leaf)
        then()
        between = numerics.current()
        grads = torch.autograd.grad(y.square().sum(), (leaf, *model.parameters()))
        assert numerics.current() == between
        return list(grads)

    assert _equal(gradients(True), gradients(False))


def test_what_is_set_one_by_one_comes_back() -> None:
    """A backend's own precision, beside one for all, and what torch.get_float32_matmul_precision says."""
    torch.set_float32_matmul_precision("medium")
    forward = numerics.current()
    torch.set_float32_matmul_precision("highest")
    with numerics.under(forward):
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    assert torch.get_float32_matmul_precision() == "highest"
    torch.backends.mkldnn.matmul.fp32_precision = "none"
    torch.backends.fp32_precision = "bf16"
    with numerics.under(forward), contextlib.suppress(RuntimeError):
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    torch.backends.fp32_precision = "none"
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"
    with pytest.raises(RuntimeError, match=r"expected \d+ settings, got 1"), numerics.under((1,)):
        pass


def _settings_of(precision: str) -> numerics.Settings:
    torch.set_float32_matmul_precision(precision)
    found = numerics.current()
    assert found is not None
    return found


def _of_process(values: numerics.Settings | None) -> numerics.Settings:
    assert values is not None
    return values[2:]  # behind the thread's own


def test_threads_that_need_other_settings_of_the_process_take_turns() -> None:
    """Each computes under its own, and in the end those of the user are back."""
    medium, high = _settings_of("medium"), _settings_of("high")
    user = _settings_of("highest")
    entered, done = threading.Event(), threading.Event()
    held: list[numerics.Settings] = []

    def work() -> None:
        with numerics.under(high):
            entered.set()
            assert done.wait(30)
            held.append(_of_process(numerics.current()))

    thread = threading.Thread(target=work)
    with numerics.under(medium):
        thread.start()
        entered.wait(0.3)  # it never comes, unless they interleave
        assert _of_process(numerics.current()) == _of_process(medium)
    assert entered.wait(30)
    done.set()
    thread.join()
    assert held == [_of_process(high)]
    assert numerics.current() == user
    assert torch.get_float32_matmul_precision() == "highest"


def test_threads_that_need_the_same_settings_go_side_by_side() -> None:
    """And the last of them, not the first, sets back what the user had."""
    medium = _settings_of("medium")
    user = _settings_of("highest")
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        with numerics.under(medium):
            entered.set()
            assert leave.wait(30)
            assert _of_process(numerics.current()) == _of_process(medium)

    with numerics.under(medium):
        thread = threading.Thread(target=work)
        thread.start()
        assert entered.wait(30)
    assert _of_process(numerics.current()) == _of_process(medium)
    leave.set()
    thread.join()
    assert numerics.current() == user


def test_settings_within_settings() -> None:
    medium, high = _settings_of("medium"), _settings_of("high")
    user = _settings_of("highest")
    with numerics.under(medium):
        with numerics.under(high):
            assert numerics.current() == high
            with numerics.under(user):
                assert numerics.current() == user
            assert numerics.current() == high
        assert numerics.current() == medium
    assert numerics.current() == user


def test_a_forward_under_the_settings_of_another_threads_backward_keeps_them() -> None:
    """Whatever holds when it begins holds until it ends, and for its own backward."""
    medium = _settings_of("medium")
    _settings_of("highest")
    block = FusedCheckpointBlock.llama(64, 2, dim_feedforward=96)
    x = torch.randn(1, 5, 64, requires_grad=True)
    found: list[Tensor] = []
    with numerics.under(medium):
        _elsewhere(lambda: found.append(block(x)))
        (expected,) = torch.autograd.grad(block(x).sum(), x)
    assert torch.equal(torch.autograd.grad(found[0].sum(), x)[0], expected)

"""Derived layers under torch.compile: one graph in which each is one op, and guards on what their code may read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptfused
from tests.models.compare import close
from tests.models.derive.test_convert import Stack, step, twins
from tests.models.derive.written import GPT, LLAMA, arguments
from tests.models.small import unfused


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Ops:
    """A backend that counts the block ops of every graph."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.counts.append(sum("ckptfused.block" in str(node.target) for node in graph.graph.nodes))
        return graph.forward


def named(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("_orig_mod.", ""): t for name, t in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "backend"),
    [
        pytest.param(LLAMA, "aot_eager", id="llama-aot_eager"),
        pytest.param(GPT, "aot_eager", id="gpt-aot_eager"),
        pytest.param(GPT, "inductor", id="gpt-inductor", marks=[pytest.mark.slow, pytest.mark.extended]),
        pytest.param(LLAMA, "inductor", id="llama-inductor", marks=[pytest.mark.slow, pytest.mark.extended]),
    ],
)
def test_one_graph_with_right_gradients(source: str, backend: str) -> None:
    plain, converted = twins(source)
    compiled = torch.compile(converted, fullgraph=True, backend=backend)
    with unfused() as reasons:
        for tokens in (9, 14):
            close(named(step(compiled, source, tokens)), step(plain, source, tokens), 1e-10)
    assert not reasons


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, None])
def test_each_length_is_a_graph(dynamic: bool | None) -> None:
    plain, converted = twins(GPT, count=1)
    ops = Ops()
    compiled = torch.compile(converted, fullgraph=True, backend=ops, dynamic=dynamic)
    for tokens in (9, 14, 9, 14):
        close(named(step(compiled, GPT, tokens)), step(plain, GPT, tokens), 1e-10)
    assert ops.counts == [1, 1]


@pytest.mark.slow
def test_a_length_at_which_it_is_no_block() -> None:
    source = GPT.replace("        return x\n", "        return x if x.shape[1] < 12 or x.shape[1] == 256 else 2 * x\n")
    plain, converted = twins(source, count=1)
    ops = Ops()
    compiled = torch.compile(converted, backend=ops)
    for tokens in (11, 12):
        close(named(step(compiled, GPT, tokens)), step(plain, GPT, tokens), 1e-10)
    assert ops.counts[0] == 1 and not any(ops.counts[1:])


def another_rate(model: Any) -> None:
    for layer in model.layers:
        layer.dropout.p = 1.0


def other_heads(model: Any) -> None:
    for layer in model.layers:
        layer.attn.heads = 2


def another_module(model: Any) -> None:
    for layer in model.layers:
        layer.ln_2 = nn.Identity()


@pytest.mark.slow
@pytest.mark.parametrize("change", [another_rate, other_heads, another_module], ids=lambda f: f.__name__)
def test_what_changes_is_traced_again(change: Callable[[Any], None]) -> None:
    plain, converted = twins(GPT, count=1)
    compiled = torch.compile(converted, backend="eager")
    before = step(plain, GPT)["y"]
    close(named(step(compiled, GPT)), step(plain, GPT), 1e-10)
    for model in (plain, converted):
        change(model)
    assert not torch.allclose(step(plain, GPT)["y"], before)
    close(named(step(compiled, GPT)), step(plain, GPT), 1e-10)


@pytest.mark.slow
def test_training_and_evaluation() -> None:
    """Dropout is that of the mode in which the model is."""
    plain, converted = twins(GPT, p=0.5, count=1)
    compiled = torch.compile(converted, fullgraph=True, backend="aot_eager")
    drawn = [step(compiled, GPT)["y"] for _ in range(2)]
    assert not torch.allclose(*drawn)
    compiled.eval(), plain.eval()
    close(named(step(compiled, GPT)), step(plain, GPT), 1e-10)


@pytest.mark.slow
def test_layers_compiled_by_themselves_share_code() -> None:
    """Layers of one kind, each compiled alone, are compiled once."""
    plain, converted = twins(GPT, count=12)
    ops = Ops()
    for layer in converted.layers:
        layer.compile(fullgraph=True, backend=ops)
    close(step(converted, GPT), step(plain, GPT), 1e-10)
    assert ops.counts == [1]


@pytest.mark.slow
def test_layers_that_differ_in_what_is_no_number_run_as_they_are() -> None:
    torch.manual_seed(0)
    plain = Stack(GPT)
    plain.layers[1].attn.bias.fill_(1.0)  # type: ignore[union-attr, operator]
    converted = copy.deepcopy(plain)
    assert ckptfused.convert(converted).fused == 2
    ops = Ops()
    compiled = torch.compile(converted, backend=ops)
    close(named(step(compiled, GPT)), step(plain, GPT), 1e-10)
    assert not any(ops.counts)


@pytest.mark.slow
def test_a_copy_of_another_type() -> None:
    """Models of one class, of which one has other weights, are told apart."""
    plain, converted = twins(GPT.replace(".float()", ""), count=1)
    other = copy.deepcopy(converted).float()
    ops = Ops()
    x = arguments(GPT)[0]
    torch.testing.assert_close(torch.compile(other, fullgraph=True, backend=ops)(x), copy.deepcopy(plain).float()(x))
    close(named(step(torch.compile(converted, fullgraph=True, backend=ops), GPT)), step(plain, GPT), 1e-10)
    assert ops.counts == [1, 1]

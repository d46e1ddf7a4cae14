"""A module that is remembered from its last call sees at the next one whatever changed: as a new module does.

Where the change alters what is computed, what the first call remembered gives another result.
"""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize

from ckptfused import FusedCheckpointAttention, FusedCheckpointBlock, FusedCheckpointFFN
from ckptfused._extension import _C
from ckptfused.layer import remembered
from ckptfused.modules.fused import FusedModule

C, H, HIDDEN = 16, 2, 24
Change = Callable[[Any], Any]


def encoder() -> FusedCheckpointBlock:
    return FusedCheckpointBlock(C, H, HIDDEN, 0.0, batch_first=True, norm_first=True)


def llama() -> FusedCheckpointBlock:
    return FusedCheckpointBlock.llama(C, H, HIDDEN, qk_norm=True, num_kv_heads=1)


def attention() -> FusedCheckpointAttention:
    return FusedCheckpointAttention(C, H, 0.0, batch_first=True)


def ffn() -> FusedCheckpointFFN:
    return FusedCheckpointFFN(C, HIDDEN, 0.0, "silu", batch_first=True)


MADE: tuple[Callable[[], FusedModule], ...] = (encoder, llama, attention, ffn)


def x_of(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 5, C, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()


def is_remembered(module: nn.Module, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the next call of the module will ask nothing of it."""
    seen = remembered._seen.get(module, {}).get(dtype)
    return seen is not None and seen.guard.tensors(module) is not None


def results(module: Any, x: Tensor) -> list[Any]:
    """What a call gives, by the same random numbers: the result and all gradients, or what it raises."""
    torch.manual_seed(1)
    try:
        y = module(x)
        wanted = [t for t in (x, *module.parameters()) if t.requires_grad]
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), wanted)]
    except (TypeError, ValueError, RuntimeError) as error:
        return [str(error)]


def same(a: list[Any], b: list[Any]) -> bool:
    def one(first: Any, second: Any) -> bool:
        return first.equal(second) if isinstance(first, Tensor) and isinstance(second, Tensor) else first == second

    return len(a) == len(b) and all(map(one, a, b))


def put(name: str, value: Any) -> Change:
    owner, _, attribute = name.rpartition(".")

    def change(module: Any) -> None:
        holder, values = module.get_submodule(owner), value
        setattr(holder, attribute, values(getattr(holder, attribute)) if callable(values) else values)

    return change


def halved(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach() / 2)


def hook(name: str) -> Change:
    def change(module: Any) -> None:
        module.get_submodule(name).register_forward_hook(lambda _, args, y: y * 2)

    return change


def forward_of(name: str) -> Change:
    def change(module: Any) -> None:
        inner = module.get_submodule(name)
        own = inner.forward
        inner.forward = lambda *args: own(*args) * 2

    return change


def ff_block(module: Any) -> None:
    own = module._ff_block
    module._ff_block = lambda x: own(x) * 2


def other_data(module: Any) -> None:
    module.linear1.weight.data = torch.zeros(HIDDEN + 1, C)


def moved(module: Any) -> None:
    module.double().float()


def swapped(module: Any) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        assigned(module)
        moved(module)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def parametrized(name: str) -> Change:
    class Twice(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2

    def change(module: Any) -> None:
        owner, _, weight = name.rpartition(".")
        parametrize.register_parametrization(module.get_submodule(owner), weight, Twice())

    return change


def assigned(module: Any) -> None:
    module.load_state_dict({name: t / 2 for name, t in module.state_dict().items()}, assign=True)


def tied(module: Any) -> None:
    module.norm2.weight = module.norm1.weight


def untrained(name: str) -> Change:
    """After calls with dropout in that module."""

    def change(module: Any) -> None:
        module.dropout.p = 0.5
        module(x_of())
        module.get_submodule(name).eval()

    return change


CHANGES: dict[str, Change] = {
    "p": put("dropout1.p", 0.5),
    "attention's p": put("self_attn.dropout", 0.5),
    "training": untrained(""),
    "a child's training": untrained("dropout"),
    "norm_first": put("norm_first", False),
    "activation": put("activation", lambda _: "silu"),
    "an activation's module": put("activation", lambda _: nn.GELU(approximate="tanh")),
    "an activation without a kernel": put("activation", lambda _: torch.tanh),
    "eps": put("norm1.eps", 0.5),
    "batch_first": put("self_attn.batch_first", False),
    "keep": put("keep", "all"),
    "scratch": put("scratch", 2000),
    "parallel": put("parallel", True),
    "a parameter": put("linear1.weight", halved),
    "a parameter's data": other_data,
    "another shape": put("linear2.bias", lambda b: nn.Parameter(b.detach().new_zeros(C + 1))),
    "another type": put("linear1.weight", lambda w: nn.Parameter(w.detach().bfloat16())),
    "a parameter removed": put("linear1.bias", None),
    "frozen": lambda module: module.linear1.weight.requires_grad_(False),
    "tied": tied,
    "a hook": hook("linear1"),
    "a hook on a norm": hook("norm2"),
    "a hook on attention": hook("self_attn"),
    "a backward hook": lambda module: module.linear2.register_full_backward_hook(lambda _, dx, dy: (dx[0] * 2,)),
    "a forward": forward_of("dropout2"),
    "a method": ff_block,
    "a child": put("linear2", lambda _: nn.Linear(HIDDEN, C, bias=False)),
    "a child of another class": put("norm1", lambda _: nn.RMSNorm(C)),
    "a child of one's own": put("norm1", lambda _: type("Mine", (nn.LayerNorm,), {"forward": lambda _, x: 2 * x})(C)),
    "a parametrization": parametrized("linear1.weight"),
    "a norm's parametrization": parametrized("norm1.weight"),
    "load_state_dict": assigned,
    "to and fro": moved,
    "tensors that change places": swapped,
}
AS_BEFORE = ("keep", "scratch", "to and fro", "training", "a child's training")
"""The changes after which the results are those of a new block."""


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.filterwarnings("ignore:.*ackward hook:UserWarning")
@pytest.mark.parametrize("name", CHANGES)
def test_a_change(name: str) -> None:
    block, x, change = encoder(), x_of(), CHANGES[name]
    fresh = copy.deepcopy(block)
    before = results(block, x)
    assert is_remembered(block)
    torch.manual_seed(2)
    change(block)
    torch.manual_seed(2)
    change(fresh)
    remembered._seen.pop(fresh, None)  # some changes call it
    got, want = results(block, x), results(fresh, x)
    assert same(got, want), (got, want)
    assert same(got, before) == (name in AS_BEFORE)


def test_weights_that_were_one() -> None:
    block, x = encoder(), x_of()
    tied(block)
    before = results(block, x)
    block.norm2.weight = halved(block.norm2.weight)
    got = results(block, x)
    assert same(got, results(copy.deepcopy(block), x)) and not torch.equal(got[0], before[0])


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_what_is_remembered(make: Callable[[], FusedModule]) -> None:
    """Each of the modules is, and computes the same then, whatever its weights hold."""
    module, x = make(), x_of()
    first = results(module, x)
    assert is_remembered(module) and same(results(module, x), first)
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(1.5)
    assert is_remembered(module)
    fresh = copy.deepcopy(module)
    assert not is_remembered(fresh) and same(results(module, x), results(fresh, x))


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_remembering_reads_nothing(make: Callable[[], FusedModule], monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = make(), x_of()
    before = module(x)
    monkeypatch.setattr(remembered, "_read", lambda *_: pytest.fail("it was read again"))
    assert torch.equal(module(x), before)


CLASSES = [(nn.Linear, "forward"), (nn.LayerNorm, "forward"), (nn.Module, "__call__"), (FusedCheckpointBlock, "parts")]


@pytest.mark.parametrize(("cls", "name"), CLASSES, ids=lambda v: getattr(v, "__name__", v))
def test_a_patched_class(cls: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block = encoder()
    block(x_of())
    assert is_remembered(block)
    own = getattr(cls, name)
    monkeypatch.setattr(cls, name, lambda *args, **kwargs: own(*args, **kwargs))
    assert not is_remembered(block)
    monkeypatch.undo()
    block(x_of())
    assert is_remembered(block)


def test_what_is_not_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    block, own = encoder(), F.scaled_dot_product_attention
    block(x_of())
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: own(*args, **kwargs) * 2)
    assert is_remembered(block)
    assert "scaled_dot_product_attention" in (block.generic_reason() or "")
    monkeypatch.undo()
    with register_module_forward_hook(lambda *_: None):
        assert block.generic_reason() == "hooks on all modules"
    assert is_remembered(block) and block.generic_reason() is None


def test_types_of_x_and_of_weights() -> None:
    """A norm's eps of None is that of x's type."""
    block = llama()
    for inner in block.modules():
        if isinstance(inner, nn.RMSNorm):
            inner.eps = None
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32):
        block.to(dtype)
        fresh, x = copy.deepcopy(block), x_of(dtype)
        assert same(results(block, x), results(fresh, x)) and is_remembered(block, dtype)
        assert same(results(block, x), results(fresh, x))
    assert results(block, x_of(torch.float64)) == results(copy.deepcopy(block), x_of(torch.float64))


def test_other_tensors_for_a_call() -> None:
    block, x = encoder(), x_of()
    before = block(x)
    for wrap in (nn.Parameter, lambda t: t):
        other = {name: wrap(t.detach() / 2) for name, t in block.named_parameters()}
        fresh = copy.deepcopy(block)
        fresh.load_state_dict(other)
        got = functional_call(block, other, (x,))
        assert torch.equal(got, fresh(x)) and not torch.equal(got, before)
    assert torch.equal(block(x), before)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies(copied: Callable[[Any], Any]) -> None:
    for make in MADE:
        module, x = make(), x_of()
        attributes = [list(vars(inner)) for inner in module.modules()]
        before = module(x)
        assert [list(vars(inner)) for inner in module.modules()] == attributes
        other = copied(module)
        with torch.no_grad():
            other.linear2.weight.zero_() if hasattr(other, "linear2") else other.self_attn.out_proj.weight.zero_()
        assert same(results(other, x), results(copy.deepcopy(other), x)) and torch.equal(module(x), before)


@pytest.mark.slow
def test_compiled_after_it_was_called() -> None:
    block, x = encoder(), x_of()
    block(x)
    compiled: Any = torch.compile(block, backend="eager", fullgraph=True)
    for change in (lambda _: None, put("norm1.eps", 0.5), put("linear1.weight", halved), put("norm_first", False)):
        change(block)
        assert torch.equal(compiled(x), copy.deepcopy(block)(x)) and torch.equal(compiled(x), block(x))
    torch._dynamo.reset()


def test_a_layer_taken_over() -> None:
    plain = nn.TransformerEncoderLayer(C, H, HIDDEN, 0.0, batch_first=True)
    x, blocks = x_of(), [FusedCheckpointBlock.from_layer(plain) for _ in range(2)]
    for block in blocks:
        assert torch.equal(block(x), blocks[0](x)) and is_remembered(block)
    plain.norm1.eps = 0.5  # which is theirs, too
    assert not any(map(is_remembered, blocks))


def test_nothing_is_kept_alive() -> None:
    """A parameter's hook may reach the module: what held the parameter would hold it for good."""
    block = encoder()
    block.linear1.weight.register_hook(lambda _, owner=block: None)
    block(x_of())
    assert is_remembered(block)
    dies = [weakref.ref(block), weakref.ref(block.linear1), weakref.ref(block.norm1.weight)]
    del block
    gc.collect()
    assert [there() for there in dies] == [None] * 3


class Mine(FusedCheckpointBlock):
    def parts(self) -> Any:
        return super().parts()


UNKNOWN: dict[str, Callable[[], nn.Module]] = {
    "a class of somebody else": lambda: Mine(C, H, HIDDEN),
    "a list": lambda: with_attribute("notes", []),
    "an object": lambda: with_attribute("notes", object()),
    "a lambda": lambda: with_attribute("notes", lambda: None),
    "a method": lambda: with_attribute("notes", [].append),
    "a module below itself": lambda: with_attribute("itself", None),
}


def with_attribute(name: str, value: Any) -> nn.Module:
    block = encoder()
    setattr(block.norm1, name, block if name == "itself" else value)
    return block


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_may_be_anything_is_read_at_every_call(name: str) -> None:
    module = UNKNOWN[name]()
    module(x_of())
    assert not is_remembered(module) and not _C.ModuleGuard(set()).look(module)


def test_a_change_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread: what was read before is not remembered with what is there after."""
    block, read = encoder(), remembered._read

    def slowly(*args: Any) -> Any:
        found = read(*args)
        other = threading.Thread(target=setattr, args=(block, "norm_first", False))
        other.start()
        other.join()
        return found

    monkeypatch.setattr(remembered, "_read", slowly)
    block(x_of())
    monkeypatch.undo()
    assert not is_remembered(block) and same(results(block, x_of()), results(copy.deepcopy(block), x_of()))

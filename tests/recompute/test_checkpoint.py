"""What `ckptfused.checkpoint` has beyond `torch.utils.checkpoint`: writes, guards, containers, memory."""

from __future__ import annotations

import gc
import queue
import threading
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as torch_checkpoint

from ckptfused.checkpoint import checkpoint, checkpoint_sequential
from tests.accounting import Events, saved_bytes

Pair = namedtuple("Pair", ["first", "second"])
torchs = partial(torch_checkpoint.checkpoint, use_reentrant=False)
plain: Callable[..., Any] = lambda function, *args, **kwargs: function(*args, **kwargs)  # noqa: E731


@dataclass
class Record:
    value: Tensor
    scale: float = 2.0
    more: dict[str, Tensor] = field(default_factory=dict)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3, 4))).requires_grad_()


def _double_list(values: list[Tensor]) -> Tensor:
    values[1].mul_(2)
    return values[0].exp() * values[1].exp()


def _write_row(x: Tensor) -> Tensor:
    x[0] = 3.0
    return x.square()


def _write_view(x: Tensor) -> Tensor:
    x[:, 1:].mul_(x[:, :1].detach().sigmoid())
    return x.square()


def _relu(x: Tensor, y: Tensor) -> Tensor:
    return (nn.functional.relu(x, inplace=True) @ y.t()).tanh()


def _mask(x: Tensor, *, mask: Tensor) -> Tensor:
    return (x.exp() * mask.mul_(0.5)).square()


def _nested(tree: dict[str, Any]) -> Tensor:
    return tree["a"][0].exp_() * tree["a"][1]["b"].tanh_().square()


def _pair(pair: Pair, table: OrderedDict[str, Tensor]) -> Tensor:
    return pair.first.sigmoid_() * pair.second.exp() * table["k"].cos_().exp()


def _record(record: Record) -> Tensor:
    return record.value.relu_().exp() * record.scale * record.more["w"].tanh_()


# Each writes to an argument first, and needs for its gradients what it wrote or what was there before.
WRITES: dict[str, Callable[[], tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]]]] = {
    "relu": lambda: (_relu, (leaf(), leaf()), {}),
    "module": lambda: (nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Tanh()), (leaf(),), {}),
    "add": lambda: (lambda x: x.add_(1).exp().square(), (leaf(),), {}),
    "setitem": lambda: (_write_row, (leaf(),), {}),
    "view": lambda: (_write_view, (leaf(),), {}),
    "list": lambda: (_double_list, ([leaf(), leaf()],), {}),
    "kwarg": lambda: (_mask, (leaf(),), {"mask": leaf()}),
    "nested": lambda: (_nested, ({"a": [leaf(), {"b": leaf()}]},), {}),
    "namedtuple": lambda: (_pair, (Pair(leaf(), leaf()), OrderedDict(k=leaf())), {}),
    "dataclass": lambda: (_record, (Record(leaf(), 3.0, {"w": leaf()}),), {}),
    "transposed": lambda: (lambda x: x.exp_().square(), (leaf().t(),), {}),
}


def tensors_in(tree: Any) -> Iterator[Tensor]:
    for value in pytree.tree_leaves(tree):
        if isinstance(value, Record):
            yield from (value.value, *value.more.values())
        elif isinstance(value, Tensor):
            yield value


def activations(tree: Any) -> Any:
    """The same tree with each leaf tensor times one: what a layer before would have handed over."""

    def map_one(value: Any) -> Any:
        if isinstance(value, Record):
            return Record(value.value * 1, value.scale, {name: t * 1 for name, t in value.more.items()})
        return value * 1 if isinstance(value, Tensor) else value

    return pytree.tree_map(map_one, tree)


def gradients(
    call: Callable[..., Tensor], function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    """The result and the gradients with respect to the tensors among the arguments and to the parameters."""
    leaves = list(tensors_in((args, kwargs)))
    weights = list(function.parameters()) if isinstance(function, nn.Module) else []
    given_args, given_kwargs = activations((args, kwargs))
    result = call(function, *given_args, **given_kwargs)
    return [result.detach(), *torch.autograd.grad(result.sin().sum(), [*leaves, *weights])]


def equal(got: list[Tensor], expected: list[Tensor]) -> bool:
    return len(got) == len(expected) and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", WRITES)
def test_writes_to_arguments_give_the_plain_gradients(name: str) -> None:
    function, args, kwargs = WRITES[name]()
    assert equal(gradients(checkpoint, function, args, kwargs), gradients(plain, function, args, kwargs))


@pytest.mark.parametrize("name", WRITES)
def test_torch_raises_or_is_wrong_there(name: str) -> None:
    function, args, kwargs = WRITES[name]()
    expected = gradients(plain, function, args, kwargs)
    try:
        got = gradients(torchs, function, args, kwargs)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
    else:
        assert not equal(got, expected)


@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference"])
@pytest.mark.parametrize("name", WRITES)
def test_the_caller_keeps_what_it_gave(name: str, mode: str) -> None:
    function, args, kwargs = WRITES[name]()
    before = [(t, t._version, t.detach().clone(), t.data_ptr()) for t in tensors_in((args, kwargs))]
    with {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]():
        expected = function(*activations(args), **activations(kwargs))
        result = checkpoint(function, *args, **kwargs)
    assert torch.equal(result, expected) and result.requires_grad == (mode == "grad")
    for t, version, value, address in before:
        assert t._version == version and torch.equal(t, value) and t.data_ptr() == address


@pytest.mark.parametrize("name", WRITES)
def test_a_second_backward_gives_the_same(name: str) -> None:
    function, args, kwargs = WRITES[name]()
    leaves = list(tensors_in((args, kwargs)))
    loss = checkpoint(function, *args, **kwargs).square().sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert equal(list(torch.autograd.grad(loss, leaves)), list(first))


@dataclass
class _Notes:
    seen: Tensor
    last: Tensor | None = None


@pytest.mark.parametrize("grad", [True, False])
def test_what_the_function_puts_into_containers_is_there_once(grad: bool) -> None:
    def function(x: Tensor, values: list[Tensor], table: dict[str, Any], notes: _Notes) -> Tensor:
        values.append(values[0].exp())
        table["inner"].append(x)
        table["new"] = table.pop("k") * 2
        notes.last = values[-1] * 3
        written = x.neg_()
        table["written"] = written
        return values.pop(0) * table["new"] * values[0]

    def loss(call: Callable[..., Any]) -> tuple[Tensor, list[Tensor], Any]:
        torch.manual_seed(1)
        x, a, k = leaf(), leaf(), leaf()
        inner: list[Tensor] = []
        values, table, notes = [a], {"k": k, "inner": inner}, _Notes(a)
        y = call(function, x * 1, values, table, notes)
        assert table["inner"] is inner and len(inner) == len(values) == 1 and list(table) == ["inner", "new", "written"]
        assert notes.seen is a and notes.last is not None
        total = y.sum() + values[0].sin().sum() + (table["new"] * table["written"]).sum() + notes.last.cos().sum()
        return total + inner[0].exp().sum(), [x, a, k], (values, table, notes)

    with torch.set_grad_enabled(grad):
        got, leaves, held = loss(checkpoint)
        expected, plain_leaves, _ = loss(lambda function, *args: function(*args))
    assert torch.equal(got, expected)
    if grad:
        assert equal(list(torch.autograd.grad(got, leaves)), list(torch.autograd.grad(expected, plain_leaves)))
    assert len(held[0]) == len(held[1]["inner"]) == 1  # the replay adds nothing


class _Output(OrderedDict):  # type: ignore[type-arg]
    """An output like Hugging Face's: attributes that are items, and no method that takes items away."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__.update(items)

    def clear(self) -> None:
        raise NotImplementedError

    update = pop = clear  # type: ignore[assignment]

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.__dict__[key] = value


class _Pair:
    def __init__(self, first: Tensor, others: list[Tensor]) -> None:
        self.first, self.others = first, others


pytree.register_pytree_node(
    _Output, lambda o: ([*o.values()], [*o]), lambda v, k: _Output(**dict(zip(k, v, strict=True)))
)
pytree.register_pytree_node(_Pair, lambda p: ([p.first, p.others], None), lambda values, _: _Pair(*values))


def test_what_the_function_puts_into_registered_containers_is_there_once() -> None:
    def function(pair: _Pair, output: _Output) -> Tensor:
        pair.others.append(pair.first.exp())
        pair.first = pair.first * 2
        output["new"] = output["old"].sin()
        output["old"] = pair.first.cos()
        return pair.first + output["new"]

    def found(call: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(1)
        x, y = leaf(), leaf()
        pair, output = _Pair(x * 1, [y]), _Output(old=y * 1)
        results = [call(function, pair, output), pair.first, *pair.others, *output.values(), output.old, output.new]
        assert [*output] == ["old", "new"] and len(pair.others) == 2
        grads = torch.autograd.grad(sum(r.sin().sum() for r in results), [x, y])
        assert len(pair.others) == 2  # the replay adds nothing
        return [*results, *grads]

    assert equal(found(checkpoint), found(lambda function, *args: function(*args)))


def test_nothing_is_copied_where_nothing_is_written() -> None:
    addresses: queue.SimpleQueue[list[int]] = queue.SimpleQueue()  # a list of ours would not show the replay's

    def function(x: Tensor, *, more: list[Tensor]) -> Tensor:
        addresses.put([torch._C._data_address(t) for t in (x, *more)])
        return (x.exp() * more[0].sin()).square()

    x, other = leaf(), leaf()
    expected = [x.data_ptr(), other.data_ptr()]
    checkpoint(function, x, more=[other]).sum().backward()
    assert [addresses.get_nowait() for _ in range(2)] == [expected, expected]


HANDED_BACK: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda x: x,
    "view": lambda x: x.view(-1),
    "part": lambda x: (x[1:], x.detach()),
    "list": lambda x: [x, {"x": x.t()}],
    "function": lambda x: _AsItIs.apply(x),
}


class _AsItIs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * gradient


@pytest.mark.parametrize("outside", ["numpy", "dlpack", "storage"])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("name", HANDED_BACK)
def test_arguments_keep_their_memory(name: str, grad: bool, outside: str) -> None:
    """However the result is used, whatever else reads the argument's memory goes on to read the argument."""
    leaf_ = torch.zeros(1 << 12).view(64, 64).requires_grad_()
    x = leaf_ * 1
    address = x.data_ptr()
    same: Any = {
        "numpy": lambda: torch.from_numpy(x.detach().numpy()),
        "dlpack": lambda: torch.from_dlpack(x.detach()),
        "storage": lambda: torch.empty(0).set_(x.untyped_storage()).view(64, 64),
    }[outside]()
    with torch.set_grad_enabled(grad):
        y = checkpoint(HANDED_BACK[name], x)
    assert not torch._C._is_cow_tensor(x) and torch._C._data_address(x) == address
    for t in pytree.tree_leaves(y):
        assert not torch._C._is_cow_tensor(t)
        assert torch._C._data_address(t) != torch._C._data_address(x) or t is x or name == "part"
    if grad:
        pytree.tree_leaves(y)[0].sum().backward()
        expected = {"part": torch.ones(64, 64), "function": 3 * torch.ones(64, 64)}.get(name, torch.ones(64, 64))
        if name == "part":
            expected[0] = 0
        assert leaf_.grad is not None and torch.equal(leaf_.grad, expected)
    with torch.no_grad():
        x.add_(1)
    del y
    gc.collect(1)  # what the call made is young
    same[0, 0] = 3
    assert x[0, 0] == 3 and torch._C._data_address(x) == address
    assert bool((x.flatten()[1:] == 1).all())


def test_what_is_handed_back_untouched_is_the_callers_own() -> None:
    x, bias = leaf() * 1, torch.randn(3, 4)
    y, same = checkpoint(lambda x, bias: (x.exp() + bias, bias), x, bias)
    assert same is bias
    assert checkpoint(nn.Identity(), x) is x
    written = checkpoint(lambda x: x.mul_(2), x)
    assert written is not x and not torch.equal(written, x)
    (y + written).sum().backward()


def test_a_copy_of_a_copy_outlives_the_first() -> None:
    """The inner call's argument is the outer's copy; all that is left of both in the end is what the inner one kept."""
    kept: list[Tensor] = []
    on_write = torch.ops.ckptfused.copy_on_write
    for ends in ("outer", "inner"):
        x = torch.arange(1 << 16, dtype=torch.float32)
        [outer], outer_guard = on_write([x])
        [inner], inner_guard = on_write([outer])
        assert torch._C._data_address(inner) == x.data_ptr()
        if ends == "outer":
            del outer_guard, outer, x
            torch.full((1 << 16,), -1.0)  # takes memory that is free
            assert torch.equal(inner, torch.arange(1 << 16, dtype=torch.float32))
            del inner_guard
        else:
            del inner_guard
            assert torch._C._data_address(outer) == x.data_ptr() != torch._C._data_address(inner)
            outer.zero_()
            assert x[1] == 1
        assert torch.equal(inner, torch.arange(1 << 16, dtype=torch.float32))
        kept.append(inner.add_(1))
    assert torch.equal(*kept)


def test_an_argument_saved_by_a_function_is_the_argument() -> None:
    saved: list[Tensor] = []

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
            ctx.save_for_backward(scale)
            return x * scale

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            saved.extend(ctx.saved_tensors)
            return gradient * saved[-1], None

    def written_later(x: Tensor, scale: Tensor) -> Tensor:
        y = Scale.apply(x, scale) * scale
        scale.mul_(3)
        return y * scale

    x, scale = leaf(), torch.randn(4)
    checkpoint(Scale.apply, x, scale).sum().backward()
    assert saved[0] is scale
    (gradient,) = torch.autograd.grad(checkpoint(written_later, x, scale).sum(), x)
    torch.testing.assert_close(gradient, (3 * scale**3).expand(3, 4))


def test_arguments_are_left_alone_by_an_exception() -> None:
    x = leaf() * 1
    address = x.data_ptr()
    kept: list[Tensor] = []
    with pytest.raises(ZeroDivisionError):
        checkpoint(lambda x: [kept.append(x), 1 / 0], x)
    assert not torch._C._is_cow_tensor(x) and torch._C._data_address(x) == address
    assert not torch._C._is_cow_tensor(kept[0]) and torch._C._data_address(kept[0]) != address
    assert torch.equal(kept[0], x)


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_arguments_are_only_read_while_other_threads_read_them(grad: bool) -> None:
    shared = [torch.ones(16) for _ in range(48)]
    addresses = [t.data_ptr() for t in shared]
    wrong: list[str] = []

    def work() -> None:
        with torch.set_grad_enabled(grad):
            for _ in range(60):
                y = checkpoint(lambda *tensors: tensors[0] * 2 + tensors[1].add_(1), *shared)
                if not torch.equal(y, torch.full((16,), 4.0)):
                    wrong.append("result")
                if any(map(torch._C._is_cow_tensor, shared)) or list(map(torch._C._data_address, shared)) != addresses:
                    wrong.append("argument")

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and all(torch.equal(t, torch.ones(16)) for t in shared)


SIZE = 1 << 16


@pytest.mark.parametrize("call", [checkpoint, torchs], ids=["ckptfused", "torch"])
def test_only_arguments_are_saved(call: Callable[..., Tensor]) -> None:
    x, y, mask = leaf(SIZE), leaf(SIZE), torch.ones(SIZE)
    function = lambda x, values, *, mask: (x.exp() * values[0].exp() * mask).square().sin()  # noqa: E731
    assert saved_bytes(lambda: call(function, x, [y], mask=mask), own=[x, y, mask]) == 0
    events = Events(lambda: call(function, x, [y], mask=mask))
    assert events.live_bytes() - 4 * SIZE <= 8192  # the result, and copies of the generator's 5056 bytes of state


def test_all_arguments_go_through_the_hooks_for_saved_tensors() -> None:
    x, y, mask = leaf(SIZE), leaf(SIZE), torch.ones(SIZE)
    function = lambda x, values, *, mask: (x.exp() * values[0].exp() * mask).square().sin()  # noqa: E731
    assert saved_bytes(lambda: checkpoint(function, x, [y], mask=mask)) == 3 * 4 * SIZE


def test_nothing_outlives_backward() -> None:
    gc.disable()  # no cycles: reference counts free everything
    try:
        x = leaf() * 1
        y = checkpoint(lambda values: values[0].relu_().exp(), [x])
        alive, storage = weakref.ref(x), weakref.ref(y)
        del x
        assert alive() is not None
        y.sum().backward()
        del y
        assert alive() is None and storage() is None
    finally:
        gc.enable()


def test_an_inner_checkpoint_keeps_nothing_for_the_outer() -> None:
    inner_inputs: list[weakref.ref[Tensor]] = []

    def inner(values: list[Tensor]) -> Tensor:
        return values[0].relu_().exp() * values[1]

    def outer(x: Tensor) -> Tensor:
        hidden = x.tanh_().exp()
        inner_inputs.append(weakref.ref(hidden))
        return checkpoint(inner, [hidden, x]).square()

    x = leaf()
    y = checkpoint(outer, x)
    assert inner_inputs[0]() is None
    y.sin().sum().backward()
    got, x.grad = x.grad, None
    hidden = x.tanh()
    (hidden.exp().relu().exp() * hidden).square().sin().sum().backward()
    assert x.grad is not None and torch.equal(got, x.grad)


@dataclass
class Change:
    """A call, and a tensor among its arguments by its name in errors."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensor: Tensor


def _changes() -> Iterator[Change]:
    h = leaf() * 1
    yield Change("args[0]", (h,), {}, h)
    yield Change("args[1]", (leaf(), h), {}, h)
    yield Change("args[1][0]", (leaf(), [h]), {}, h)
    yield Change("args[0]['a'][1]", ({"a": (leaf(), h)},), {}, h)
    yield Change("kwargs['mask']", (leaf(),), {"mask": h}, h)
    yield Change("kwargs['more']['deep'][0]", (leaf(),), {"more": {"deep": [h]}}, h)
    yield Change("args[0].second", (Pair(leaf(), h),), {}, h)
    yield Change("args[0]['value']", (Record(h),), {}, h)
    yield Change("args[0]['more']['w']", (Record(leaf(), more={"w": h}),), {}, h)
    yield Change("args[0]", (h.view(-1),), {}, h)
    yield Change("args[0]", (h[1],), {}, h)
    yield Change("kwargs['index']", (leaf(),), {"index": (index := torch.arange(4))}, index)


CHANGES = [change.name for change in _changes()]


def _use(*args: Any, **kwargs: Any) -> Tensor:
    return torch.stack([t.double().exp().sum() for t in tensors_in((args, kwargs))]).square().sum()


@pytest.mark.parametrize("at", range(len(CHANGES)), ids=[f"{i}-{name}" for i, name in enumerate(CHANGES)])
def test_an_argument_changed_before_backward_raises_with_its_name(at: int) -> None:
    change = list(_changes())[at]
    y = checkpoint(_use, *change.args, **change.kwargs)
    version = change.tensor._version
    with torch.no_grad():
        change.tensor.add_(1)
    with pytest.raises(RuntimeError) as caught:
        y.backward()
    assert f"{change.name} was changed in place" in str(caught.value)
    assert f"expected version {version}, got version {version + 1}" in str(caught.value)


class Box:
    def __init__(self, *held: Any) -> None:
        self.held = held


def test_containers_that_do_not_name_what_they_hold() -> None:
    pytree.register_pytree_node(Box, lambda box: (list(box.held), None), lambda held, _: Box(*held))
    try:
        x, y = leaf() * 1, leaf()
        loss = checkpoint(lambda box: (box.held[0].exp_() * box.held[1].exp()).sum(), Box(y, x))
        x.add_(1)
        with pytest.raises(RuntimeError, match="leaf 1 of the arguments was changed in place"):
            loss.backward()
    finally:
        pytree._deregister_pytree_node(Box)


def test_torch_does_not_see_changes_of_keyword_arguments() -> None:
    x, scale = leaf(), torch.ones(3, 4)
    y = torchs(lambda x, *, scale: x * scale, x, scale=scale)
    scale.zero_()
    y.sum().backward()
    assert x.grad is not None and not x.grad.any()  # ones, without the change


def test_a_change_after_backward_is_fine() -> None:
    x, y = leaf() * 1, leaf() * 1
    checkpoint(_use, x, [y]).backward()
    x.add_(1)
    y.add_(1)


def test_a_changed_result_is_no_changed_argument() -> None:
    x = leaf()
    same, y = checkpoint(lambda x: (x, x.exp()), x)
    same.mul_(2)
    (same + y).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, 2 + x.detach().exp())


@pytest.mark.parametrize("change", ["append", "replace", "remove", "key"])
def test_the_replay_sees_containers_as_they_were(change: str) -> None:
    x, values, table = leaf(), [leaf(), leaf()], {"k": leaf()}
    leaves = [x, *values, *table.values()]

    def function(x: Tensor, values: list[Tensor], *, table: dict[str, Tensor]) -> Tensor:
        return x.exp() * torch.stack(values).sin().prod(0) * torch.stack(list(table.values())).cos().prod(0)

    expected = torch.autograd.grad(function(x, values, table=table).sum(), leaves)
    y = checkpoint(function, x, values, table=table).sum()
    if change == "append":
        values.append(leaf())
    elif change == "replace":
        values[0] = leaf()
    elif change == "remove":
        del values[1]
    else:
        table["other"] = table.pop("k") * 3
    assert equal(list(torch.autograd.grad(y, leaves)), list(expected))


def test_one_tensor_given_twice_is_one_copy() -> None:
    def function(a: Tensor, b: list[Tensor]) -> Tensor:
        a.relu_()
        return a.exp() * b[0]

    x = leaf()
    h, h_plain = x * 1, x * 1
    y, expected = checkpoint(function, h, [h]), function(h_plain, [h_plain])
    assert torch.equal(y, expected)
    assert torch.equal(*(torch.autograd.grad(t.sum(), x)[0] for t in (y, expected)))


OVERLAPPING: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "row": lambda t: (t, t[0]),
    "rows": lambda t: (t[:2], t[1:]),
    "transposed": lambda t: (t, t.t()),
    "bits": lambda t: (t, t.detach().view(torch.int16)),
}
APART: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "rows": lambda t: (t[:2], t[2:]),
    "every-other": lambda t: (t[::2], t[1::2]),
    "columns": lambda t: (t[:, 2:], t[:, :2]),
}


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("views", OVERLAPPING.values(), ids=OVERLAPPING)
def test_a_write_that_another_argument_would_see_is_refused(views: Callable[..., Any], grad: bool) -> None:
    base = leaf(4, 4) * 1
    with torch.set_grad_enabled(grad):
        with pytest.raises(RuntimeError, match=r"args\[0\] in place, which shares memory with kwargs\['other'\]"):
            checkpoint(lambda a, other: a.exp_().sum() + other.sum(), views(base)[0], other=views(base)[1])
        checkpoint(lambda a, other: a.exp().sum() + other.sum(), views(base)[0], other=views(base)[1])


@pytest.mark.parametrize("views", APART.values(), ids=APART)
def test_views_side_by_side_can_be_written(views: Callable[..., Any]) -> None:
    x = leaf(4, 4)
    function = lambda a, b: (a.exp_() * b.sin()).square()  # noqa: E731
    got, expected = (call(function, *views(x * 1)) for call in (checkpoint, plain))
    assert torch.equal(got, expected)
    assert torch.equal(*(torch.autograd.grad(t.sum(), x)[0] for t in (got, expected)))


class Named(Tensor):
    pass


def made_in_inference_mode() -> Tensor:
    with torch.inference_mode():
        return torch.randn(3, 4)


UNUSUAL: dict[str, Callable[[], Tensor]] = {
    "numpy": lambda: torch.from_numpy(torch.randn(3, 4).numpy().copy()),
    "shared": lambda: torch.randn(3, 4).share_memory_(),
    "subclass": lambda: torch.randn(3, 4).as_subclass(Named),
    "subclass-grad": lambda: leaf().as_subclass(Named),
    "parameter": lambda: nn.Parameter(torch.randn(3, 4)),
    "sparse": lambda: torch.eye(3, 4).to_sparse(),
    "complex": lambda: torch.randn(3, 4, dtype=torch.complex64),
    "conjugated": lambda: torch.randn(3, 4, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(3, 4, dtype=torch.complex64).conj().imag,
    "part": lambda: torch.randn(8, 9)[3:6, 2:6],
    "empty": lambda: torch.randn(0, 4),
    "meta": lambda: torch.randn(3, 4, device="meta"),
    "inference": made_in_inference_mode,
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_attributes_of_tensors(name: str) -> None:
    x, t = leaf(), UNUSUAL[name]()
    t.scale = 3.0  # type: ignore[attr-defined]
    for call in (checkpoint, lambda function, *given: checkpoint_sequential([lambda both: function(*both)], 1, given)):
        y = call(lambda x, t: x.exp() * t.scale, x, t)
        assert torch.equal(*torch.autograd.grad(y.sum(), x), 3 * x.detach().exp())


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_tensors(name: str) -> None:
    other = UNUSUAL[name]()
    x = leaf(*other.shape) if other.device.type == "cpu" else torch.randn(3, 4, device="meta").requires_grad_()
    seen = []

    def function(x: Tensor, t: Tensor) -> Tensor:
        seen.append(type(t))
        t.mul_(3)
        return (x.exp() * (t.to_dense() if t.is_sparse else t).abs()).square().sum().as_subclass(Tensor)

    before = other.detach().clone()
    got = torch.autograd.grad(checkpoint(function, x, other), x)[0]
    expected = torch.autograd.grad(function(x, before.clone()), x)[0]
    assert seen[0] == seen[1] == (Tensor if name == "parameter" else type(other))
    if name != "meta":
        assert torch.equal(got, expected)
        assert torch.equal(*(t.to_dense() if t.is_sparse else t for t in (other.detach(), before)))


def _trees() -> st.SearchStrategy[Any]:
    tensors = st.builds(lambda seed: ("tensor", seed), st.integers(0, 3))
    return st.recursive(
        tensors | st.none() | st.integers(-3, 3) | st.text(max_size=2),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(lambda values: ("tuple", *values))
            | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        ),
        max_leaves=8,
    )


def _make(tree: Any, leaves: dict[int, Tensor]) -> Any:
    if isinstance(tree, tuple):
        if tree[0] == "tensor":
            return leaves.setdefault(tree[1], torch.randn(2, 3).requires_grad_())
        return tuple(_make(value, leaves) for value in tree[1:])
    if isinstance(tree, list):
        return [_make(value, leaves) for value in tree]
    return {key: _make(value, leaves) for key, value in tree.items()} if isinstance(tree, dict) else tree


@given(
    st.lists(_trees(), max_size=3), st.dictionaries(st.sampled_from("abc"), _trees(), max_size=2), st.integers(0, 99)
)
def test_any_tree_of_arguments(args: list[Any], kwargs: dict[str, Any], chosen: int) -> None:
    """Writes to every other tensor of any arguments, the same tensor more than once among them."""
    leaves: dict[int, Tensor] = {9: leaf(2, 3)}
    given_args, given_kwargs = _make(args, leaves), _make(kwargs, leaves)
    calls = []

    def function(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(pytree.tree_map_only(Tensor, lambda t: t.shape, (args, kwargs)))
        total = torch.zeros(2, 3)
        for i, t in enumerate(pytree.tree_leaves((args, kwargs))):
            if isinstance(t, Tensor):
                total = total + (t.mul_(0.5) if (i + chosen) % 2 else t).exp().sin()
        return total

    wanted = list(leaves.values())

    def run(call: Callable[..., Tensor]) -> list[Tensor]:
        memo = {id(t): t * 1 for t in wanted}
        tree_args, tree_kwargs = pytree.tree_map_only(Tensor, lambda t: memo[id(t)], (given_args, given_kwargs))
        result = call(function, leaves[9] * 1, *tree_args, **tree_kwargs)
        return [result.detach(), *torch.autograd.grad(result.sum(), wanted, allow_unused=True, materialize_grads=True)]

    got, expected = run(checkpoint), run(plain)
    assert calls[0] == calls[1]
    # The order in which autograd sums the gradients of several uses may differ.
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@dataclass
class Node:
    value: Any
    others: Any = None


def test_arguments_that_contain_themselves() -> None:
    """Refused where there is something to copy, in one sentence; other objects are handed on as they are."""
    x = torch.ones(2, requires_grad=True)
    node, deep, plain, cycle = Node(x.detach()), Node(x.detach()), Node(3), [x]
    node.others, deep.others, plain.others = {"me": node}, [Node(1, deep)], [plain]
    cycle.append(cycle)  # type: ignore[arg-type]
    for argument in (node, deep, cycle):
        for grad in (True, False):
            with (
                torch.set_grad_enabled(grad),
                pytest.raises(ValueError, match="no container that is among its own contents"),
            ):
                checkpoint(lambda x, _: x * 2, x, argument)
    assert torch.equal(checkpoint(lambda x, node: x * node.others[0].value, x, plain), 3 * x)

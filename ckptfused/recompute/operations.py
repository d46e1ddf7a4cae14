"""Operations of a call as the dispatcher runs them, below autograd and autocast: what each reads, and what it makes.

What depends on nothing but tensors that are there anyway need not be saved: the same operations make it again, to the
bit. No code of the call runs a second time, so no hook, counter, draw or choice does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ckptfused.compat.torch_dispatch import DispatchMode, schema_of, tensors_of
from ckptfused.compat.torch_memory import storage_id
from ckptfused.recompute.copy_on_write import is_view_of_storage, write_count

OWN = ("ckptfused::attention_block_fwd", "ckptfused::ffn_block_fwd")
"""Ops of ours that are made again: pure, random states being among their arguments."""
# What they draw or return may be another value the next time, or was written by what no dispatcher sees.
_UNLIKE = tuple(
    getattr(torch.Tag, name)
    for name in ("nondeterministic_seeded", "nondeterministic_bitwise", "inplace_view")
    if hasattr(torch.Tag, name)
)
_UNSET = ("empty", "new_empty")
_NARROW = ((1 << 8, torch.uint8), (1 << 15, torch.int16), (1 << 63, torch.int64))


class Made(NamedTuple):
    """A result of an operation, by the numbers of both."""

    operation: int
    output: int


class Read(NamedTuple):
    """A tensor that no recorded operation made, by its number among those."""

    number: int


_STANDS = (Made, Read)


@dataclass(slots=True)
class Operation:
    """One call of an operation, with `Made` and `Read` in the place of tensors."""

    function: Any
    args: Any = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    after: set[int] = field(default_factory=set)
    """The operations that made what it reads."""
    last: set[int] = field(default_factory=set)
    """The operations that read what it overwrites: where they are made again, too, it comes after them."""
    reads: set[int] = field(default_factory=set)
    """The numbers of its `Read`s."""

    def __call__(self, given: Callable[[Any], Tensor]) -> list[Tensor]:
        """Its results, with what `given` says in the place of tensors."""
        made = self.function(*_filled(self.args, _STANDS, given), **_filled(self.kwargs, _STANDS, given))
        return [made] if isinstance(made, Tensor) else tensors_of(made)


class _Memory:
    """A storage that tensors of the call lie in."""

    def __init__(self, t: Tensor) -> None:
        self.alive = StorageWeakRef(t.untyped_storage())
        """No other storage takes its number as long as this stands."""
        self.layouts: dict[Any, Made] = {}
        self.writer: int | None = None
        """The operation that made it, or last wrote to it; None of what no operation made."""
        self.users: set[int] = set()


class Operations(DispatchMode):
    """Records what is called while it is at work."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[Operation] = []
        self.read: list[tuple[Tensor, int | None]] = []
        """The tensors that it did not make, each with its version when it was read."""
        self.own: dict[int, Tensor] = {}
        """The first results of `OWN`, by their operations."""
        self.apart = False
        """Whether what is called now is recorded by nobody, so that its results are there anyway."""
        self._numbers: dict[Any, int] = {}
        self._memory: dict[int, _Memory] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_of(args, kwargs)
        can_be_repeated, writes = _kind(func)
        written = tensors_of(*(_argument(args, kwargs, *place) for place in writes)) if writes else []
        call = None
        if can_be_repeated and not self.apart and all(map(can_be_recorded, given)) and all(map(self._is_made, written)):
            call = self._call(func, args, kwargs, given)
        result = func(*args, **kwargs)
        made = [result] if isinstance(result, Tensor) else tensors_of(result)
        if call is None:
            for t in filter(can_be_recorded, written):
                self._forget(t)
        elif made and all(map(can_be_recorded, made)):
            self._note(call, given, written, made)
        return result

    def place(self, t: Tensor) -> tuple[Made, tuple[int, ...]] | None:
        """Which operation's result t is, and by the end of which it has the values that it has now; None if no recorded
        one made it, or it is there anyway, though an alias of it was made."""
        memory = self._memory.get(storage_id(t)) if can_be_recorded(t) and self.number(t) is None else None
        made = None if memory is None else memory.layouts.get(_layout(t))
        if memory is None or made is None:
            return None
        last = made.operation if memory.writer is None else memory.writer
        return made, (made.operation,) if last == made.operation else (made.operation, last)

    def number(self, t: Tensor) -> int | None:
        """The number of a tensor that was read as it is now, and that no operation made; None of others."""
        return self._numbers.get((storage_id(t), _layout(t), write_count(t))) if can_be_recorded(t) else None

    def end(self) -> None:
        """Lets go of all but what is recorded."""
        self.read.clear()
        self.own.clear()
        self._numbers.clear()
        self._memory.clear()

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any], given: list[Tensor]) -> Operation:
        call = Operation(func)
        references: dict[int, Made | Read] = {}
        for t in given:
            memory, layout = self._memory.get(storage_id(t)), _layout(t)
            made = None if memory is None else memory.layouts.get(layout)
            if made is None:
                references[id(t)] = read = self._read(t, layout)
                call.reads.add(read.number)
            else:
                references[id(t)] = made
                call.after.add(made.operation)
                if memory.writer is not None:  # type: ignore[union-attr]
                    call.after.add(memory.writer)  # type: ignore[union-attr]
        call.args = _filled(args, Tensor, lambda t: references[id(t)])
        call.kwargs = _filled(kwargs, Tensor, lambda t: references[id(t)]) if kwargs else kwargs
        return call

    def _read(self, t: Tensor, layout: Any) -> Read:
        now = write_count(t)
        number = self._numbers.setdefault((storage_id(t), layout, now), len(self.read))
        if number == len(self.read):
            self.read.append((t, now))
        return Read(number)

    def _is_made(self, t: Tensor) -> bool:
        memory = self._memory.get(storage_id(t))
        return memory is not None and memory.writer is not None

    def _forget(self, t: Tensor) -> None:
        """Nothing is known of what was written by what cannot be repeated."""
        memory = self._memory.get(storage_id(t))
        if memory is not None:
            memory.layouts.clear()
            memory.writer = None

    def _note(self, call: Operation, given: list[Tensor], written: list[Tensor], made: list[Tensor]) -> None:
        if call.function is torch.ops.aten.topk.default:
            self._note_choice(call, given[0], *made)
            return
        number = self._add(call, given)
        if call.function.namespace != "aten":
            self.own[number] = made[0]
        for t in written:
            memory = self._memory[storage_id(t)]
            call.last |= memory.users - {number}
            memory.writer = number
        for output, t in enumerate(made):
            self._found(t, Made(number, output), given)

    def _note_choice(self, call: Operation, source: Tensor, values: Tensor, indices: Tensor) -> None:
        """The indices of a choice are kept, each in as few bytes as hold it: nothing chooses again."""
        dim = call.args[2] if len(call.args) > 2 else -1
        size = source.size(dim) if source.dim() else 1
        dtype = next(dtype for most, dtype in _NARROW if size <= most)
        kept = indices.to(dtype)
        widened = self._call(torch.ops.aten._to_copy.default, (kept,), {"dtype": indices.dtype}, [kept])
        self._found(indices, Made(self._add(widened, [kept]), 0), [])
        chosen = self._call(torch.ops.aten.gather.default, (source, dim, indices), {}, [source, indices])
        self._found(values, Made(self._add(chosen, [source, indices]), 0), [])

    def _add(self, call: Operation, given: list[Tensor]) -> int:
        number = len(self.recorded)
        self.recorded.append(call)
        for t in given:
            if (memory := self._memory.get(storage_id(t))) is not None:
                memory.users.add(number)
        return number

    def _found(self, t: Tensor, made: Made, given: list[Tensor]) -> None:
        storage = storage_id(t)
        memory = self._memory.get(storage)
        if memory is None:
            memory = self._memory[storage] = _Memory(t)
            memory.writer = None if any(storage_id(other) == storage for other in given) else made.operation
        memory.layouts[_layout(t)] = made


def can_be_recorded(t: Tensor) -> bool:
    """Whether operations on t are noted: not those on subclasses with a dispatch of their own."""
    return is_view_of_storage(t) and not t.is_complex()


def _layout(t: Tensor) -> Any:
    return t.storage_offset(), t.shape, t.stride(), t.dtype


@functools.cache
def _kind(func: Any) -> tuple[bool, tuple[tuple[int, str], ...]]:
    """Whether an operation makes the same of the same, and which arguments it writes to, by place and name."""
    places = enumerate(schema_of(func).arguments)
    writes = tuple((i, a.name) for i, a in places if a.alias_info is not None and a.alias_info.is_write)
    if func.namespace != "aten":
        return func.name() in OWN, writes
    unlike = any(tag in func.tags for tag in _UNLIKE)
    return not unlike and not func.overloadpacket.__name__.startswith(_UNSET), writes


def _argument(args: Any, kwargs: dict[str, Any], place: int, name: str) -> Any:
    return args[place] if place < len(args) else kwargs.get(name)


def _filled(value: Any, kind: Any, given: Callable[[Any], Any]) -> Any:
    """A value with what `given` says in the place of what is of this kind."""
    if isinstance(value, kind):
        return given(value)
    if type(value) in (tuple, list):
        return type(value)([_filled(v, kind, given) for v in value])
    if type(value) is dict:
        return {name: _filled(v, kind, given) for name, v in value.items()}
    return value

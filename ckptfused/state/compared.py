"""What a layer's state was, for comparing with what it is: a difference is seen without holding the tensors of then."""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn


class _Held:
    """A tensor that something holds, told by its identity, for comparing: as the left operand. It may end."""

    __slots__ = ("_ref",)

    def __init__(self, t: Tensor) -> None:
        self._ref = weakref.ref(t)

    def __eq__(self, other: object) -> bool:
        return self._ref() is other

    __hash__ = None  # type: ignore[assignment]


class _Itself:
    """An object that says itself what it equals, told by its identity, for comparing: as the left operand."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return self._value is other

    __hash__ = None  # type: ignore[assignment]


_BY_VALUE = (int, float, complex, str, bytes, list, tuple, dict, set, frozenset, deque, nn.Module, nn.Parameter)


def to_compare(value: Any) -> Any:
    """A value for the left side of a comparison with what is there later, which holds no tensor but parameters."""
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return _Held(value)
    return value if type(value).__eq__ is object.__eq__ or isinstance(value, _BY_VALUE) else _Itself(value)


def copy_to_compare(held: dict[Any, Any]) -> dict[Any, Any]:
    """A dict for the same."""
    return {k: to_compare(v) for k, v in held.items()}


def is_same(was: Any, now: Any) -> bool:
    """Whether a value of `to_compare`'s is another one itself."""
    return was is now or (type(was) in (_Held, _Itself) and was == now)


class Apart:
    """The attributes of a module but those of some names, as the right side of a comparison."""

    __slots__ = ("_names", "_own")

    def __init__(self, own: dict[str, Any], names: frozenset[str]) -> None:
        self._own, self._names = own, names

    def __eq__(self, was: object) -> bool:
        return was == {k: v for k, v in self._own.items() if k not in self._names}

    __hash__ = None  # type: ignore[assignment]


class SlotValues:
    """What the `__slots__` of an object hold, as the right side of a comparison."""

    __slots__ = ("_names", "_value")

    def __init__(self, value: Any, names: tuple[str, ...]) -> None:
        self._value, self._names = value, names

    def held(self) -> dict[str, Any]:
        """The values by name, of those that are set."""
        return {name: getattr(self._value, name) for name in self._names if hasattr(self._value, name)}

    def __eq__(self, was: object) -> bool:
        return was == self.held()

    __hash__ = None  # type: ignore[assignment]


class TensorAttributes:
    """The attributes of tensors that have such names, as the right side of a comparison."""

    __slots__ = ("_held", "_names")

    def __init__(self, tensors: Iterable[Tensor], names: frozenset[str]) -> None:
        self._held, self._names = [vars(t) for t in tensors], names

    def held(self) -> list[dict[str, Any]]:
        """The attributes of each by name."""
        return [{k: v for k, v in held.items() if k in self._names} if held else {} for held in self._held]

    def why(self) -> str:
        """Why code with these names may do something else with the tensors than with copies; "" where none has any."""
        found = next((name for held in self.held() for name in held), "")
        return f"a tensor that it holds has an attribute {found!r}, which its code may read" if found else ""

    def __eq__(self, was: object) -> bool:
        return was == self.held()

    __hash__ = None  # type: ignore[assignment]


class Cell:
    """A cell of a closure, which has its value under any name."""

    __slots__ = ("_cell",)

    def __init__(self, cell: Any) -> None:
        self._cell = cell

    def get(self, name: str, default: Any = None) -> Any:
        """What is in it, or the default where nothing is yet."""
        try:
            return self._cell.cell_contents
        except ValueError:
            return default


class ClassAttributes:
    """Attributes of a class and how many it has, for comparing."""

    __slots__ = ("_cls", "_names")

    def __init__(self, cls: type, names: tuple[str, ...]) -> None:
        self._cls, self._names = cls, names

    def __eq__(self, was: object) -> bool:
        held = vars(self._cls)
        now = (len(held), *map(held.get, self._names))
        return all(map(operator.is_, now, was))  # type: ignore[call-overload]

    __hash__ = None  # type: ignore[assignment]

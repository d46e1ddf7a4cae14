"""How a field of a spec says what it is: its row in the table that `fields.py` declares."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple

from .adapters import Adapter
from .checks import check_at_least, check_bool, check_choice, check_integer, check_number, check_probability
from .quantized import Quantized


class Key(NamedTuple):
    """What a declaration says of a field beside its name, type and default: `Annotated[int, Key("Heads.", least=1)]`.

    `least` bounds a number (None: any finite one; an int is never below 0), `allowed` lists the words of a str.
    `called`: each call decides it anew, whatever the layer is.
    """

    meaning: str
    allowed: tuple[str, ...] = ()
    least: int | None = None
    probability: bool = False
    called: bool = False


TYPES: dict[Any, str] = {
    bool: "bool",
    int: "int",
    float: "float",
    float | None: "float | None",
    str: "str",
    str | None: "str | None",
    bool | Literal["shared"]: "bool | 'shared'",
    tuple[str, ...]: "names",
    tuple[Adapter, ...]: "adapters",
    tuple[Quantized, ...]: "quantized",
}


class Row(NamedTuple):
    """One field: of which type, a name among `TYPES`; `default` is `dataclasses.MISSING` where it must be given."""

    name: str
    type: str
    default: Any
    key: Key

    @property
    def required(self) -> bool:
        """Whether the field has no default."""
        return self.default is dataclasses.MISSING

    def checked(self, where: str, value: Any) -> Any:
        """The value, a number as Python's own: NumPy's would not read back from the text. **Raises** naming `where`."""
        kind = self.type.removesuffix(" | None")
        if value is None and kind != self.type:
            return None
        if kind == "str":
            check_choice(where, value, self.key.allowed)
        elif kind == "bool":
            check_bool(where, value)
        elif kind == "int":
            return check_integer(where, value, self.key.least or 0)
        elif kind == "float":
            if self.key.probability:
                return check_probability(where, value)
            return (
                check_number(where, value) if self.key.least is None else check_at_least(where, value, self.key.least)
            )
        return value


def _rows(kind: type) -> tuple[Row, ...]:
    found = [
        Row(f.name, TYPES[f.type.__origin__], f.default, f.type.__metadata__[0])  # type: ignore[union-attr]
        for f in dataclasses.fields(kind)
        if hasattr(f.type, "__metadata__")
    ]
    return tuple(sorted(found, key=lambda row: not row.required))


rows: Callable[[type], tuple[Row, ...]] = cache(_rows)
"""The rows of a spec's class in the order of its text: first those that must be given."""


def check_rows(spec: Any, prefix: str = "") -> None:
    """Check every field of a spec by its row; numbers become Python's own, whole ones floats where a float is meant."""
    for row in rows(type(spec)):
        object.__setattr__(spec, row.name, row.checked(prefix + row.name, getattr(spec, row.name)))

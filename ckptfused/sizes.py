"""Numbers of bytes, and of things, as people write and read them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ckptfused.spec.checks import check_at_least, check_integer

_UNITS = {"": 1, "b": 1, **{f"{k}{b}": n**i for n, b in ((1000, "b"), (1024, "ib")) for i, k in enumerate("kmgt", 1)}}
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(where: str, value: float | str) -> int:
    """A number of bytes: a number of at least 1, rounded down, or a text such as "256MiB" or "1.5 GB".

    **Raises** `ValueError` or `TypeError` naming `where`.
    """
    if not isinstance(value, str):
        return int(check_at_least(where, value, 1)) if isinstance(value, float) else check_integer(where, value, 1)
    found = _TEXT.fullmatch(value)
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None or (count := int(float(found[1]) * unit)) < 1:
        raise ValueError(
            f'{where}: expected a number of bytes such as 268435456 or "256MiB" (KB, MB, GB, TB: powers of 1000; KiB, '
            f"MiB, GiB, TiB: of 1024), got {value!r}"
        )
    return count


def size(count: int, digits: int = 2) -> str:
    """Bytes in the largest unit of which there is one: "1.50 GiB"."""
    unit, name = byte_unit(count)
    return f"{count / unit:,.{digits}f} {name}" if unit > 1 else f"{count} B"


def byte_unit(count: float) -> tuple[int, str]:
    """The largest unit of bytes of which there is one, in bytes, and its name."""
    return next((u for u in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")) if count >= u[0]), (1, "B"))


def second_unit(count: float) -> tuple[float, str]:
    """The same of seconds."""
    return next((u for u in ((1.0, "s"), (1e-3, "ms")) if count >= u[0]), (1e-6, "µs"))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose columns begin one below the other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def counted(count: int, noun: str) -> str:
    """So many of what a noun, in the singular, names: "1 layer", "2,048 tokens"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"

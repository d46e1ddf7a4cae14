"""What the doctor found: data, and a table for a person."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, overload

from ckptfused.profiler.table import printed

SEVERITIES = ("error", "warning", "advice")
_STYLES = {"error": "bold red", "warning": "yellow", "advice": "cyan"}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or could be better."""

    severity: str
    """"error": gradients or buffers are wrong, or a step fails. "warning": it may go wrong, or does work twice.
    "advice": it is right, and costs more than it has to."""
    place: str
    """The module, as in `named_modules()`, or modules, separated by commas; "the model" for all of it."""
    text: str
    """What was found."""
    mend: str
    """What to do."""
    refutable: bool = field(default=False, repr=False)
    """A step that is proved to be right makes the error a warning: others may not be."""

    def __post_init__(self) -> None:
        assert self.severity in SEVERITIES, self.severity

    def refuted(self) -> Finding:
        """What is left of it beside a certificate."""
        if not self.refutable:
            return self
        return replace(self, severity="warning", text=f"{self.text}; the step that was proved was right by its shapes")


class Findings(Sequence[Finding]):
    """Findings, the gravest first. Printed, a table."""

    def __init__(self, found: Iterable[Finding], certificate: str = "") -> None:
        self._found = sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))
        self.certificate = certificate
        """What was proved, or why nothing was."""

    @overload
    def __getitem__(self, index: int) -> Finding: ...
    @overload
    def __getitem__(self, index: slice) -> list[Finding]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._found[index]

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._found)

    def of(self, severity: str) -> list[Finding]:
        """The findings of one severity."""
        return [finding for finding in self if finding.severity == severity]

    @property
    def healthy(self) -> bool:
        """Whether nothing is an error."""
        return not self.of("error")

    def to_json(self) -> str:
        """The findings and the certificate's text as JSON."""
        return json.dumps({"findings": list(map(_as_dict, self)), "certificate": self.certificate}, indent=2)

    def __rich__(self) -> Any:
        """The table, for `rich.print`."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 1, 0))
        for title, ratio in (("severity", None), ("place", 3), ("what", 6), ("what to do", 5)):
            table.add_column(title, ratio=ratio, overflow="fold")
        for f in self:
            table.add_row(Text(f.severity, _STYLES[f.severity]), Text(f.place), Text(f.text), Text(f.mend))
        return Group(*([table] if len(self) else []), *map(Text, self._ends()))

    def __str__(self) -> str:
        lines = [f"{f.severity}: {f.place}: {f.text}. {f.mend}" for f in self]
        return printed(self.__rich__, lambda: "\n".join([*lines, *self._ends()]))

    __repr__ = __str__

    def _ends(self) -> list[str]:
        counts = {s: len(self.of(s)) for s in SEVERITIES}
        said = ", ".join(f"{n} {s}{'s' * (n > 1 and s != 'advice')}" for s, n in counts.items() if n)
        return [f"ckptfused.doctor: {said or 'nothing found'}", *([self.certificate] if self.certificate else [])]


def _as_dict(finding: Finding) -> dict[str, str]:
    return {name: value for name, value in asdict(finding).items() if name != "refutable"}


def joined(names: Iterable[str], most: int = 6) -> str:
    """Names for a place, those in the middle left out where there are many."""
    listed = list(dict.fromkeys(name or "the model" for name in names))
    if len(listed) > most:
        listed = [*listed[: most // 2], f"… ({len(listed) - most} more)", *listed[-(most - most // 2) :]]
    return ", ".join(listed)

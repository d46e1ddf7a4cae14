"""What `explain` finds, and the table that a person reads."""

from __future__ import annotations

from dataclasses import dataclass

from ckptfused.sizes import aligned, size


@dataclass(frozen=True)
class Step:
    """A step of forward: its kernel, why that one, and what backward does about its result.

    A kernel in brackets is another step, whose kernel makes this one's result too.
    """

    name: str
    kernel: str
    reason: str = ""
    backward: str = ""


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; as a string, a table for a person."""

    title: str
    steps: tuple[Step, ...]
    saved: dict[str, int]
    """Bytes held until backward, by name; empty where nothing is saved."""
    replayed: dict[str, int]
    """FLOPs of what backward makes again, by name."""
    notes: tuple[str, ...] = ()

    def step(self, name: str) -> Step:
        """The step of that name. **Raises** `KeyError`."""
        for step in self.steps:
            if step.name == name:
                return step
        raise KeyError(name)

    def __str__(self) -> str:
        steps = ((s.name, s.kernel, s.backward, s.reason) for s in self.steps)
        lines = [self.title, "", *aligned([("step", "kernel", "in backward", "why"), *steps])]
        if self.saved:
            parts = ", ".join(f"{name} {size(count, 1)}" for name, count in self.saved.items())
            lines += ["", f"Saved for backward: {size(sum(self.saved.values()), 1)} ({parts})."]
        lines += [*([] if self.saved else [""]), *self.notes]
        return "\n".join(lines)

"""What the demo asks of one training process, and what comes back."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from ckptfused.cli.models import LayerShape

REORDERED = "plain, reordered"


@dataclass(frozen=True)
class Job:
    """One variant's run; sent to its process as JSON."""

    variant: str
    shape: LayerShape
    steps: int
    batch: int
    tokens: int
    learning_rate: float
    dtype: str
    seed: int
    threads: int
    device: str
    data: str | None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        fields = json.loads(text)
        return cls(**{**fields, "shape": LayerShape(**fields["shape"])})


@dataclass
class Result:
    """What one variant did."""

    variant: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    saved_bytes: int = 0
    peak_bytes: int = 0
    text: str = ""
    """What the trained model writes."""

    @property
    def step_time(self) -> float:
        """Median seconds a step, the first three left out."""
        ordered = sorted(self.seconds[3:] or self.seconds)
        return ordered[len(ordered) // 2]

    @property
    def final_loss(self) -> float:
        """Mean of the last 20 steps: one batch's own is a matter of chance."""
        last = self.losses[-20:]
        return sum(last) / len(last)

    def add(self, record: dict[str, Any]) -> None:
        """Takes one line of the training process's report."""
        if "loss" in record:
            self.losses.append(record["loss"])
            self.seconds.append(record["seconds"])
        else:
            self.saved_bytes, self.peak_bytes = int(record["saved"]), int(record["peak"])
            self.text = record["text"]

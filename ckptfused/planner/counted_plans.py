"""Plans as they were counted, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ckptfused.models.policy import CheckpointPolicy


class Counted:
    """Plans by memory, each faster than the ones before it: of several fronts those that none of another beats."""

    def __init__(
        self, fronts: Iterable[tuple[Sequence[int], Sequence[float], Callable[[int], CheckpointPolicy]]]
    ) -> None:
        """fronts: of each the peaks, the seconds, and the policy of a point."""
        found: list[tuple[int, float, int, Callable[[int], CheckpointPolicy]]] = []
        rows = [
            (peak, spent, place, policy)
            for peaks, seconds, policy in fronts
            for place, (peak, spent) in enumerate(zip(peaks, seconds, strict=True))
        ]
        for row in sorted(rows, key=lambda row: row[:2]):
            if not found or row[1] < found[-1][1]:
                found.append(row)
        self.peaks, self.seconds = [row[0] for row in found], [row[1] for row in found]
        self._places = [row[2:] for row in found]

    def policy(self, index: int) -> CheckpointPolicy:
        place, policy = self._places[index]
        return policy(place)

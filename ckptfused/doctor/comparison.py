"""What two steps say that were compared: findings, and the certificate's text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from ckptfused.doctor.causes import Cause, cause_of, difference, surroundings
from ckptfused.doctor.findings import Finding, joined
from ckptfused.doctor.left_behind import attributes, moved_twice
from ckptfused.doctor.steps import StepRun
from ckptfused.sizes import counted

Name = Callable[[Any], str]
NOISE = 4.0
"""How often the difference of two equal steps a difference has to be that is no accident of operations that are not
deterministic: of four draws of the same size none is so far off by chance."""
_NOT_REPEATED = {
    True: "something is kept between calls that the doctor does not put back, or its operations are not deterministic",
    False: "its operations are not deterministic",
}
OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)


def unlike(a: StepRun, b: StepRun) -> bool:
    """Whether two steps differ in a bit."""
    return (a.loss, a.gradients, a.buffers, a.held) != (b.loss, b.gradients, b.buffers, b.held)


class Compared:
    """Two steps, and a third where it was taken."""

    parts = 1
    """Number of parts, of which one at a time saved everything."""
    fused = 0
    exact = False
    elsewhere: list[Cause] = []  # noqa: RUF012
    """What other ranks found, whose replays may have a part in this one's gradients."""
    rounded = False
    """Whether gradients are the same but for the order in which they were summed."""

    def __init__(
        self, name: Name, causes: list[Cause], configured: StepRun, reference: StepRun, again: StepRun | None
    ) -> None:
        self.name, self.causes = name, causes
        self.configured, self.reference, self.again = configured, reference, again
        self.regions = configured.recorder.regions
        self.foreign = [region for region in self.regions if region.foreign]
        self.noise = again is not None and unlike(configured, again)

    def findings(self) -> list[Finding]:
        configured, reference = self.configured, self.reference
        if reference.error is not None:
            return self._without_reference()
        if configured.error is not None:
            return self._failed(configured.error)
        if reference.nothing_trained:
            return []
        missing = reference.gradients.keys() - configured.gradients.keys()
        wrong = [n for n, g in configured.gradients.items() if reference.gradients.get(n) != g]
        found = [*self._missing(missing), *self._of_foreign()]
        if wrong or configured.loss != reference.loss:
            found += self._wrong(wrong)
        if not self.noise:
            found += moved_twice(configured, reference, self.name)
        return [*found, *attributes(configured, reference, self.name)]

    def text(self) -> str:
        """What was proved."""
        configured, reference = self.configured, self.reference
        modules = sum(event.begins for region in self.regions for replay in region.replays for event in replay)
        seen = f"{counted(len(self.regions), 'checkpointed call')} with {counted(modules, 'call')} of modules replayed"
        seen += f", {counted(self.fused, 'fused layer')}" if self.fused else ""
        if isinstance(reference.error, OUT_OF_MEMORY):
            done, calls = len(reference.recorder.calls), len(configured.recorder.calls)
            return (
                f"No certificate: a step that saves everything ran out of memory ({_first_line(reference.error)}) "
                f"after {done / max(calls, 1):.0%} of its forward{self._in_parts()}. What was compared instead is "
                f"every module's results in forward and replay: {seen}. For gradients, give a smaller batch."
            )
        if reference.error is not None or configured.error is not None:
            return "No certificate: a step failed."
        if reference.nothing_trained:
            return "No certificate: the loss requires no gradient."
        if self.foreign:
            return (
                "No certificate: a checkpoint that is neither PyTorch's nor ckptfused's, which cannot be taken out, "
                f"replays {counted(len(self.foreign), 'call')}. Results of modules were compared in forward and replay."
            )
        if unlike(configured, reference) and not self.rounded:
            exact = self.noise and not (self.causes or self.elsewhere or self.fused)
            also = " What each replay computed was, bit for bit, what its forward had." if exact else ""
            return f"No certificate: a step as configured and one that saves everything differ.{also}"
        gradients = counted(len(reference.gradients), "gradient")
        buffers = counted(len(reference.buffers), "buffer")
        return (
            f"Certificate: loss, {gradients} and {buffers} of a step are, "
            f"{'but for the order of sums' if self.rounded else 'bit for bit'}, those of one that saves everything"
            f"{self._in_parts()} ({seen})."
        )

    def _in_parts(self) -> str:
        return f", in {self.parts} parts for lack of memory" if self.parts > 1 else ""

    def _without_reference(self) -> list[Finding]:
        error = self.reference.error
        assert error is not None
        if isinstance(error, OUT_OF_MEMORY):
            return self._of_causes("error", "")
        if self.configured.error is not None:
            raise self.configured.error
        text = f"a step that saves everything fails: {type(error).__name__}: {_first_line(error)}"
        return [Finding("warning", "the model", text, "nothing could be proved; run the model without checkpointing")]

    def _failed(self, error: Exception) -> list[Finding]:
        recorder = self.configured.recorder
        during = "backward" if recorder.in_backward else "forward"
        text = f"its {during} fails under checkpointing only: {type(error).__name__}: {_first_line(error)}"
        found = self.causes or grouped(filter(None, (surroundings(region, self.name) for region in self.regions)))
        if found:
            return [Finding("error", c.place, f"{c.text}; {text}", c.mend) for c in found]
        changed = {self.name(region.owner): region.changed for region in self.regions if region.changed}
        last = recorder.last_replayed if recorder.in_backward else None
        module = last.owner if last is not None else recorder.last_begun[-1] if recorder.last_begun else None
        place = joined(changed) if changed else self.name(module)
        if "inplace operation" in str(error) or "in place" in str(error) or changed:
            mend = "an argument of the checkpoint is changed in place: use ckptfused.checkpoint, or inplace=False"
        else:
            mend = "let what is checkpointed depend on its inputs alone, or use ckptfused.checkpoint"
        return [Finding("error", place, text, mend)]

    def _of_foreign(self) -> list[Finding]:
        """What other libraries' checkpoints replay, in the reference, too: judged by their modules' results alone."""
        causes = grouped(filter(None, (cause_of(region, self.name) for region in self.foreign)))
        found = [
            Finding("error", c.place, f"{c.text}, under a checkpoint of another library's", c.mend) for c in causes
        ]
        unknown = [self.name(region.owner) for region in self.foreign if not region.forward]
        if unknown:
            text = "another library's checkpoint calls it in backward with arguments that no call in forward had"
            found.append(Finding("warning", joined(unknown), text, "look for what writes to its arguments"))
        return found

    def _missing(self, names: Iterable[str]) -> list[Finding]:
        lost = sorted(names)
        if not lost:
            return []
        cut = [region for region in self.regions if region.reentrant and not region.needs_grad]
        places = joined(self.name(region.owner) for region in cut) if cut else joined(map(_module, lost))
        why = "its inputs are frozen and the checkpoint is reentrant: " if cut else ""
        return [
            Finding(
                "error",
                places,
                f"{why}no gradient gets to {counted(len(lost), 'parameter')} that should have one ({joined(lost, 2)})",
                "use_reentrant=False, or model.enable_input_require_grads()",
            )
        ]

    def _wrong(self, names: list[str]) -> list[Finding]:
        worst, overall = _off(self.reference, names)
        by = f"{overall:.2g} of their norm" if overall < 0.01 else f"{overall:.0%}"
        off = f"the gradients are off by {by}" + (f", most that of {self.name(worst)}" if worst else "")
        if self.noise:
            return self._noise(names, overall, off)
        if self.causes or self.elsewhere:
            return self._of_causes("error", f"; {off}")
        if self.configured.loss != self.reference.loss:
            cause = difference(self.configured.recorder.calls, self.reference.recorder.calls, self.name)
            if cause is not None:
                return [Finding("error", cause.place, f"{cause.text}; {off}", cause.mend)]
        dtypes = {self.configured.values[n].dtype for n in names if n in self.configured.values}
        sums = max((torch.finfo(d).eps for d in dtypes), default=0.0) * (len(self.regions) + 1)
        if overall <= sums and any(region.reentrant for region in self.regions):
            self.rounded = True
            text = f"{off}: the reentrant checkpoint adds the same terms in another order, all replays are exact"
            return [Finding("advice", "the model", text, "use_reentrant=False gives the bits of a step without")]
        last = self._last(names)
        text = f"{off}, though each replay computed what its forward had; this is the last module with a wrong one"
        mend = "look there for what writes to weights, or to gradients, between forward and backward"
        return [Finding("error", last, text, mend)]

    def _last(self, names: list[str]) -> str:
        """The last module that forward called among those that hold one of these parameters.

        Whatever comes before a wrong replay gets a wrong gradient, too.
        """
        calls = self.configured.recorder.calls
        called = {self.name(event.module): i for i, event in enumerate(calls) if event.begins}
        found: dict[str, int] = {}
        for name in names:
            place = _module(self.name(name))
            while place not in called and "." in place:
                place = place.rpartition(".")[0]
            found[place] = called.get(place, -1)
        return max(found, key=found.__getitem__, default="the model")

    def _noise(self, names: list[str], overall: float, off: str) -> list[Finding]:
        """Findings about a step that gives other bits each time."""
        assert self.again is not None
        first = self.configured
        own = _off(self.again, first.gradients)[1]
        cause = difference(first.recorder.calls, self.again.recorder.calls, self.name)
        place = cause.place if cause is not None else "the model"
        text = f"two equal steps give other bits: {_NOT_REPEATED[self.exact]}; {off}"
        mend = (
            "look there for what is kept between calls outside of modules, such as iterators and closures"
            if self.exact
            else "torch.use_deterministic_algorithms(True) makes the certificate exact"
        )
        warning = Finding("warning", place, text, mend)
        if self.exact:  # between steps that differ anyway, the gradients' difference says little
            return self._of_causes("error", "; gradients are those of another function than the loss") or [warning]
        causes = self._of_causes("warning", "") if overall > NOISE * own else []
        return [warning, *(self._of_causes("error", f"; {off}", certain=True) or causes)]

    def _of_causes(self, severity: str, end: str, certain: bool = False) -> list[Finding]:
        causes = [cause for cause in self.causes or self.elsewhere if cause.certain or not certain]
        return [Finding(severity, c.place, c.text + end, c.mend) for c in causes]


def grouped(causes: Iterable[Cause]) -> list[Cause]:
    """Equal ones of several layers as one."""
    places: dict[Cause, list[str]] = defaultdict(list)
    for cause in causes:
        places[replace(cause, place="")].append(cause.place)
    return [replace(cause, place=joined(where)) for cause, where in places.items()]


def _off(step: StepRun, names: Iterable[str]) -> tuple[str, float]:
    """The parameter whose gradient is off most in a step that was compared, and the norm of all differences over that
    of all gradients."""
    wrong = {n: step.norms[n] for n in names if n in step.norms}
    worst = max(wrong, key=lambda n: _ratio(*wrong[n]), default="")
    norms, differences = sum(norm for norm, _ in step.norms.values()), sum(off for _, off in wrong.values())
    return worst, _ratio(norms, differences) ** 0.5


def _ratio(norm: float, off: float) -> float:
    return off / norm if norm else float("inf") if off else 0.0


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0] or "the model"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:300]

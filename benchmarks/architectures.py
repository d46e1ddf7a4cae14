"""What becomes of the layers of many models: a small random one of each is converted, trained a step, compared.

Swept are transformers' decoders, its encoders and towers, and blocks that others wrote. Each model is built in float64
and without dropout. A step of the converted model is compared with one of the model as it was: the loss and every
gradient. Prints a Markdown page; docs/architectures.md is the last one that was printed. Libraries beside transformers
may be in an environment of their own that sees this one; a model whose library is not there does not run.

    python -m benchmarks architectures > docs/architectures.md
    python -m benchmarks architectures olmo2 whisper nanoGPT
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import ckptfused
from benchmarks.architecture_models import Subject, decoders, encoders
from benchmarks.architecture_others import import_torchvision, others
from ckptfused.compat.pytree import tree_leaves, tree_map
from ckptfused.layer.parts import Reason
from ckptfused.models import find
from ckptfused.models.derive.calls import Ready
from ckptfused.models.derive.layer_state import KNOWN
from ckptfused.models.describe.own_forward import saved_by_autograd
from ckptfused.models.forward import ConvertedForward
from ckptfused.models.report import LayerReport

SEEN_LATER = "what it takes is seen at its first call"
LIMIT = 1e-4
"""Error of a gradient relative to its largest value. Most decoders have float32 inside (norms, softmax), blocks have
float64 there."""
HEAD = """| name | class | layers | read by | bytes/token before | after | gradients | why not whole |
|---|---|---|---|---|---|---|---|"""
MOST_REASONS = 3
"""The reasons of one architecture that are printed."""
INTRODUCTION = """# Architectures

What `convert` makes of the layers of many models, as `python -m benchmarks architectures` printed it with transformers
{version}: of each a small random model in float64 and without dropout is converted and trained a step. Bytes are those
that a layer saves for backward per token, before and after, the layers' mean. Gradients are compared with those of the
model as it was; the largest difference is relative to a gradient's largest value.

A `derived` layer has no adapter: [its own code was read and proved](convert.md#layers-without-an-adapter). Of a `part`
one half is fused, for the reason beside it; the other runs as written, checkpointed, or with its [experts](experts.md)
as one operation.
"""
SECTIONS: dict[str, tuple[str, str, Callable[[], Iterator[Subject]]]] = {
    "Decoders": (
        "architectures",
        "The causal language models of transformers, from their shrunk configurations.",
        decoders,
    ),
    "Encoders and towers": (
        "encoders and towers",
        "Those of transformers, from their shrunk configurations.",
        encoders,
    ),
    "Blocks by others": ("kinds", "Of other libraries, and written by hand after well-known repositories.", others),
}
"""Tables of the page: what is counted in each, what it is of."""


class Row(NamedTuple):
    """One architecture: what became of its layers."""

    name: str
    kind: str
    paths: Counter[str]
    """Layers by path: "fused", "part", "generic"."""
    families: tuple[str, ...]
    before: float | None
    after: float | None
    error: float | None
    """The largest relative difference of gradients; None where the model as it was does not run."""
    why: str

    @property
    def path(self) -> str:
        """One word for all layers."""
        if not self.paths:
            return "–"
        return next(iter(self.paths)) if len(self.paths) == 1 else "mixed"

    def __str__(self) -> str:
        number = lambda v: "?" if v is None else f"{v:,.0f}"  # noqa: E731
        count = ", ".join(f"{count} {path}" for path, count in sorted(self.paths.items()))
        error = "" if self.error is None else f"{self.error:.0e}"
        cells = (self.name, self.kind, count or "–", ", ".join(self.families), number(self.before), number(self.after))
        return "| " + " | ".join((*cells, error, self.why)) + " |"


def step(model: Any, subject: Subject) -> tuple[float, dict[str, Tensor]]:
    """The loss of one batch and all gradients."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(2)
    loss = subject.loss(model)
    loss.backward()
    return float(loss), {n: p.grad for n, p in model.named_parameters() if p.grad is not None and p.numel()}


def swept(subject: Subject) -> Row:
    """What becomes of one architecture."""
    name, kind, make, _ = subject
    try:
        loss, gradients = step(make(), subject)
        model = make()
    except Exception as error:  # what does not run without us has nothing to be compared
        said = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        return Row(name, kind, Counter(), (), None, None, None, f"does not run as it is: {said}")
    report = ckptfused.convert(model)
    reasons, calls = _noted(model)
    found, ours = step(model, subject)
    worst = abs(found - loss) / abs(loss)
    least = 1e-3 * max(float(g.abs().max()) for g in gradients.values())
    for key in gradients.keys() | ours.keys():
        if key not in ours or key not in gradients:
            worst = float("inf")
            continue
        a, b = gradients[key], ours[key]
        worst = max(worst, float((a - b).abs().max()) / max(float(a.abs().max()), least))
    sizes = [(one.before, one.after) for one in report.layers]
    layers = [model.get_submodule(one.name) for one in report.layers]
    halves = list(map(_why_half, layers))
    ckptfused.revert(model)
    for i, layer in enumerate(layers):
        if None in sizes[i] and id(layer) in calls and id(layer) not in reasons:
            sizes[i] = _bytes(layer, *calls[id(layer)], inputs=2 if halves[i] else 1)
    return _row(name, kind, report.layers, [reasons.get(id(layer)) for layer in layers], halves, sizes, worst)


def _noted(model: nn.Module) -> tuple[dict[int, str], dict[int, tuple[Any, Any]]]:
    """Why calls of layers are not fused, and the last call, by the layer: filled while the model runs."""
    reasons: dict[int, str] = {}
    calls: dict[int, tuple[Any, Any]] = {}

    class Noting(ConvertedForward):
        def alone(self, *args: Any, **kwargs: Any) -> Any:
            calls[id(self.layer)] = tree_map(_apart, (args, kwargs))
            return super().alone(*args, **kwargs)

        def unfused(self, reason: Reason, args: Any, kwargs: Any) -> Any:
            reasons[id(self.layer)] = reason.text
            return super().unfused(reason, args, kwargs)

    for _, layer, _ in find.layers(model):
        forward: Any = vars(layer).get("forward")
        if isinstance(forward, ConvertedForward):
            forward.__class__ = Noting
    return reasons, calls


def _apart(value: Any) -> Any:
    """A tensor without what made it."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _bytes(layer: nn.Module, args: Any, kwargs: Any, inputs: int) -> tuple[float | None, float | None]:
    """Bytes a token that a layer saves in a call that no report can guess: of its own, and of inputs alone."""
    x = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
    if x is None or x.dim() != 3:
        return None, None
    try:
        before = saved_by_autograd(layer, args, kwargs, ()) / (x.numel() // x.size(-1))
    except Exception:  # any forward may raise anything without data
        before = None
    return before, float(inputs * x.size(-1) * x.element_size())


def _row(
    name: str,
    kind: str,
    layers: tuple[LayerReport, ...],
    reasons: list[str | None],
    halves: list[str],
    sizes: list[tuple[float | None, float | None]],
    error: float,
) -> Row:
    paths: Counter[str] = Counter()
    families: dict[str, None] = {}
    why: dict[str, None] = {}
    for one, reason, half in zip(layers, reasons, halves, strict=True):
        path = "generic" if reason is not None else "part" if one.path == "part" or half else "fused"
        paths[path] += 1
        if reason is None and one.family is not None:
            families[one.family] = None
        settled = path == "part" or (reason and one.path == "generic" and not one.reason.endswith(SEEN_LATER))
        said = half or (one.reason if settled else reason)
        if said:
            why[_short(said)] = None
    means = [[size[i] for size in sizes if size[i] is not None] for i in (0, 1)]
    before, after = (sum(mean) / len(mean) if mean else None for mean in means)  # type: ignore[arg-type]
    if "generic" in paths and paths.total() == paths["generic"]:
        families = {}
    return Row(name, kind, paths, tuple(families), before, after, error, _joined(list(why)))


def _joined(reasons: list[str]) -> str:
    more = len(reasons) - MOST_REASONS
    return "; ".join(reasons[:MOST_REASONS]) + (f"; and {more} more" if more > 0 else "")


def _why_half(layer: nn.Module) -> str:
    """Why calls of a derived layer were fused in part; "" where they were not."""
    known = vars(layer).get(KNOWN)
    calls = [] if known is None else [call for one in known.seen for call in one.kind.calls.values()]
    return next((call.why for call in calls if isinstance(call, Ready) and call.rest is not None), "")


def _short(reason: str) -> str:
    """A reason with the file's name in place of its path."""
    head, found, rest = reason.partition(".py:")
    return f"{head.rpartition('/')[2]}{found}{rest}".replace("|", "\\|")


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names in the tables' first columns; default: all")
    asked = parser.parse_args(words).names
    import_torchvision()
    import transformers

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(INTRODUCTION.format(version=transformers.__version__), end="")
    wrong: list[str] = []
    for title, (counted, said, subjects) in SECTIONS.items():
        chosen = [subject for subject in subjects() if not asked or subject.name in asked]
        if not chosen:
            continue
        print(f"\n## {title}\n\n{said}\n\n{HEAD}")
        rows = []
        for subject in chosen:
            with contextlib.redirect_stdout(sys.stderr):  # what libraries say is no part of the page
                rows.append(swept(subject))
            print(rows[-1], flush=True)
        ran = [row for row in rows if row.error is not None]
        total = Counter(row.path for row in ran)
        print(f"\n{len(ran)} {counted} ran: {', '.join(f'{n} {path}' for path, n in total.most_common())}.")
        wrong += [row.name for row in ran if row.error is None or not row.error <= LIMIT]
    if wrong:
        print(f"gradients differ: {', '.join(wrong)}", file=sys.stderr)
    return len(wrong)

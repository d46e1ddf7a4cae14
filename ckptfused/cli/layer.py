"""Show what a model's layers compute, as it is read off their own code, and proved.

Of each kind of layer the forward is recorded, read call by call, and compared in float64, gradients and dropout
included, with the block that it was read to be. Where that fails, the first call that does not fit is shown with its
line. Nothing is converted: for reading what convert would have to know of a layer of your own. Exit status 3: some
layer is not what a block computes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from ckptfused.cli.errors import NO
from ckptfused.cli.options import add_model, add_step, model_and_batch, ran

if TYPE_CHECKING:
    from torch import nn

    from ckptfused.models.derive.derive import Derivation

Calls = dict[str, tuple[tuple[Any, ...], dict[str, Any]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_step(parser, seq=64, checkpoint=False)
    parser.add_argument("--calls", action="store_true", help="print every recorded call, and the rule that takes it")


def run(arguments: argparse.Namespace) -> int:
    model, batch = model_and_batch(arguments)
    found = ran(arguments, lambda: derived(model, batch))
    for names, kind, derivation in found:
        print(derivation_text(names, kind, derivation, arguments.calls))
    return 0 if all(derivation.proof is not None for *_, derivation in found) else NO


def derived(model: nn.Module, batch: Any) -> list[tuple[list[str], str, Derivation]]:
    """What the layers of a model compute: names, class and derivation, one for each kind of layer and call."""
    from ckptfused.models import find
    from ckptfused.models.derive.derive import Derivation, derive
    from ckptfused.models.describe.counts import kind_of

    layers = {name: layer for name, layer, _ in find.layers(model)} or {"": model}
    calls = layer_calls(model, batch, [*layers])
    found: dict[Any, tuple[list[str], str, Derivation]] = {}
    for name, layer in layers.items():
        if name not in calls:
            key: Any = name
            derivation = Derivation(None, "the model was not called with it")
        else:
            key = kind_of(layer, *calls[name])
            derivation = found[key][2] if key in found else derive(layer, *calls[name])
        found.setdefault(key, ([], type(layer).__name__, derivation))[0].append(name)
    return list(found.values())


def layer_calls(model: nn.Module, batch: Any, layers: list[str]) -> Calls:
    """What layers, by name, are first called with: in a forward of the model, which runs once without gradients, or, of
    a model without data, in a predicted step of a copy.
    """
    import torch

    from ckptfused.profiler.predict import predicted, simulated
    from ckptfused.profiler.step import TrainingStep, model_output
    from ckptfused.simulate.devices import device_named

    if any(p.is_meta for p in model.parameters()):
        device = device_named("h200")
        with simulated(model, TrainingStep(batch, None, device)) as (copy, step), _noted(copy, layers) as noted:
            predicted(copy, step)
    else:
        with _noted(model, layers) as noted, torch.no_grad():
            model_output(model, batch)
    calls: Calls = {}
    while not noted.empty():
        name, call = noted.get()
        calls.setdefault(name, call)
    return calls


@contextmanager
def _noted(model: nn.Module, layers: list[str]) -> Iterator[SimpleQueue[Any]]:
    """A context in which calls of a model's layers are put into a queue: a predicted step empties lists again."""
    from ckptfused.models.cache_arguments import left_empty

    noted: SimpleQueue[Any] = SimpleQueue()

    def note(name: str, layer: nn.Module, args: Any, kwargs: Any) -> None:
        without = left_empty(layer, type(layer).forward, args, kwargs)  # as a layer is called in training
        noted.put((name, without or (args, kwargs)))

    with ExitStack() as hooks:
        for name in layers:
            layer = model.get_submodule(name)
            hooks.callback(layer.register_forward_pre_hook(partial(note, name), with_kwargs=True).remove)
        yield noted


def derivation_text(names: list[str], kind: str, derivation: Derivation, calls: bool) -> str:
    """A derivation for a person."""
    others = f" and {len(names) - 1} more alike" if len(names) > 1 else ""
    lines = [f"{names[0] or 'the model'}{others}: {kind}, {len(derivation.calls)} calls"]
    proof = derivation.proof
    if calls:
        for call in derivation.calls:
            mark = ">" if call is derivation.call else " "
            rule = "" if proof is None else f"  [{proof.rules.get(call, 'as written')}]"
            shapes = ", ".join(str(list(v.shape)) for v in call.values)
            lines.append(f"  {mark} {_short(call.place)}  {call.op} -> {shapes}{rule}")
    if proof is None:
        lines.append(f"  not derived: {derivation.why}")
    else:
        worst = max(proof.errors.values())
        if derivation.why:
            lines.append(f"  only a half of it: {derivation.why}")
        lines.append(f"  reads as {proof.text}")
        lines.append(f"  proved: the result and {len(proof.errors) - 1} gradients, to {worst:.0e} of the largest value")
    return "\n".join(lines)


def _short(place: str) -> str:
    return "/".join(place.split("/")[-2:])

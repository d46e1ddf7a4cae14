"""`convert` and `revert`."""

from __future__ import annotations

from dataclasses import replace
from types import MethodType
from typing import Any

from torch import nn

from ckptfused.convert import find
from ckptfused.convert.agree import agreed
from ckptfused.convert.counts import Counts
from ckptfused.convert.describe import describe, generic_blocks, head_note
from ckptfused.convert.family import Family
from ckptfused.convert.forward import ConvertedForward
from ckptfused.convert.own_checkpoint import REPLICATE, NotReplicated
from ckptfused.convert.report import Report
from ckptfused.convert.wrapper import wrapper_note
from ckptfused.layer.peft import given_caches
from ckptfused.layer.shards import is_fully_sharded, refuse_tensor_parallel
from ckptfused.layer.source import patched
from ckptfused.layer.texts import keep_text
from ckptfused.spec import Keep, check_names

# Where accelerate keeps the forward that it put hooks around.
_BELOW_HOOKS = "_old_forward"
_OURS = ("forward", REPLICATE)  # what convert puts into a layer
PREFIX = "prefix tuning: each call has a filled key/value cache, with which a layer runs as it was"


def convert(model: nn.Module, keep: Keep = "inputs", *, process_group: Any = None) -> Report:
    """Turns an existing model into a fused-checkpoint model, in place.

    Each layer gets a `forward` of its own, as an attribute of the instance; its class, parameters, submodules,
    hooks and `state_dict` stay as they are. A layer that an adapter reads runs as one fused op that saves its
    input; any other is checkpointed with `ckptfused.checkpoint`. What is safe is decided at each call: with a
    key/value cache, or where attention weights are asked for, a layer runs as it was. A second `convert` changes
    what is kept. `revert` undoes it.

    keep: what each layer keeps for backward beside its input: a preset or names (`ckptfused.spec.KEEP_PRESETS`).
    process_group: a `torch.distributed` group, or True for the default one; the call is then a collective which
    checks that all ranks convert alike. None: no communication.

    **Saves** in each fused layer x, what `keep` names, 16 bytes of random state where it has dropout.
    **Recomputes** the rest in backward.
    **Raises** `ValueError` for an unknown `keep`, for tensor-parallel weights, and, with `process_group`, where ranks
    differ; `TypeError` if `model` is no module. The model is then as it was.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    text = keep_text(keep)
    check_names(keep if isinstance(keep, str) else tuple(keep))
    found = list(find.layers(model))
    held = [(layer, {key: vars(layer)[key] for key in _OURS if key in vars(layer)}) for _, layer, _ in found]
    try:
        if process_group is None:
            return _convert(model, found, text)
        return agreed(lambda: _convert(model, found, text), None if process_group is True else process_group)
    except Exception:
        for layer, attributes in held:
            for key in _OURS:
                vars(layer).pop(key, None)
            vars(layer).update(attributes)
        raise


def _convert(model: nn.Module, found: list[tuple[str, nn.Module, Family | None]], keep: str) -> Report:
    sharded = any(map(is_fully_sharded, model.modules()))
    for name, layer, _ in found:
        refuse_tensor_parallel(layer, name, sharded)
    reports, counts, cached = [], Counts(), set(given_caches(model))
    for name, layer, family in found:
        before = vars(layer).pop("forward", None)
        vars(layer).pop(REPLICATE, None)
        if isinstance(before, ConvertedForward):
            before = before.before
        if before is not None:
            layer.forward = before
        if not patched(layer):
            before = None
        report = describe(model, name, layer, family if before is None else None, keep, counts)
        if layer in cached:
            report = replace(report, path="original", reason=PREFIX, after=report.before)
        why = filter(None, (report.reason, wrapper_note(model, name, keep)))
        reports.append(replace(report, reason="; ".join(why)))
        layer.forward = ConvertedForward(layer, reports[-1].family, keep, before)
        vars(layer)[REPLICATE] = NotReplicated()
    return Report(tuple(reports), keep, (*generic_blocks(model), *head_note(model, reports)))


def revert(model: nn.Module) -> int:
    """Undoes `convert`: every layer gets the forward back that it had. Returns how many layers were converted."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    count = 0
    for layer in model.modules():
        if isinstance(vars(layer).get(REPLICATE), NotReplicated):
            del vars(layer)[REPLICATE]
        places = [key for key in (_BELOW_HOOKS, "forward") if isinstance(vars(layer).get(key), ConvertedForward)]
        for key in places:
            before = vars(layer)[key].before
            if before is not None:
                setattr(layer, key, before)
            elif key == "forward":
                del layer.forward
            else:
                setattr(layer, key, MethodType(type(layer).forward, layer))
        count += bool(places)
    return count

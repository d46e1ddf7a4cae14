"""A policy put into the layers of a model, and taken out again."""

from __future__ import annotations

from dataclasses import replace
from types import MethodType
from typing import Any

from torch import nn

from ckptfused.convert import find, head_forward, heads
from ckptfused.convert.agree import agreed
from ckptfused.convert.counts import Counts
from ckptfused.convert.describe import as_it_was, describe, generic_blocks, head_note, offload_note
from ckptfused.convert.family import Family
from ckptfused.convert.forward import ConvertedForward
from ckptfused.convert.own_checkpoint import NOT_REPLICATED, REPLICATE, NotReplicated
from ckptfused.convert.policy import CheckpointPolicy, LayerMode
from ckptfused.convert.report import HeadReport, LayerReport, Report
from ckptfused.convert.wrapper import wrapper_note
from ckptfused.layer.peft import given_caches
from ckptfused.layer.shards import is_fully_sharded, refuse_tensor_parallel
from ckptfused.layer.source import patched
from ckptfused.layer.texts import Mode, keep_text
from ckptfused.offload import Offloader

Found = tuple[str, nn.Module, Family | None]

# Where accelerate keeps the forward that it put hooks around.
_BELOW_HOOKS = "_old_forward"
_TOUCHED = ("forward", _BELOW_HOOKS, REPLICATE)
PREFIX = "prefix tuning: each call has a filled key/value cache, with which a layer runs as it was"


def apply(model: nn.Module, policy: CheckpointPolicy, process_group: Any = None) -> Report:
    """Has a model run as the policy says, and as no other said before; `convert` says more.

    **Raises** as `convert`; the model is then as it was.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.DataParallel):
        raise ValueError(f"model: {NOT_REPLICATED}")
    found, language_models = list(find.layers(model)), list(heads.models(model))
    touched = [*(layer for _, layer, _ in found), *(inner for _, inner in language_models)]
    held = [(module, {key: vars(module)[key] for key in _TOUCHED if key in vars(module)}) for module in touched]

    def both() -> Report:
        for _, inner in language_models:
            head_forward.take_out(inner)
        asked = () if policy.loss is None else language_models
        made = tuple(_loss(name, inner, policy.loss_scratch) for name, inner in asked)
        report = _layers(model, found, policy)
        notes = () if any(head.path == "chunked" for head in made) else head_note(model, report.layers)
        return replace(report, heads=made, notes=(*report.notes, *notes))

    try:
        if process_group is None:
            return both()
        return agreed(both, None if process_group is True else process_group)
    except Exception:
        for module, attributes in held:
            for key in _TOUCHED:
                vars(module).pop(key, None)
            vars(module).update(attributes)
        raise


def _loss(name: str, model: nn.Module, scratch: int | None) -> HeadReport:
    why = head_forward.put_in(model, scratch)
    kind = type(model).__name__
    return HeadReport(name, kind, "chunked") if why is None else HeadReport(name, kind, "original", why.text)


def _layers(model: nn.Module, found: list[Found], policy: CheckpointPolicy) -> Report:
    sharded = any(map(is_fully_sharded, model.modules()))
    for name, layer, _ in found:
        refuse_tensor_parallel(layer, name, sharded)
    modes = policy.modes(len(found))
    offloader = Offloader() if any(mode.offload for mode in modes) else None
    reports, counts, cached = [], Counts(), set(given_caches(model))
    for one, mode in zip(found, modes, strict=True):
        _take_out(one[1])
        report = _put_in(model, one, mode, offloader if mode.offload else None, counts, one[1] in cached)
        reports.append(report)
    moved = [one for one, mode in zip(found, modes, strict=True) if mode.offload]
    notes = (*generic_blocks(model), *(offload_note(moved) if moved else ()))
    return Report(tuple(reports), policy, notes)


def _put_in(
    model: nn.Module, found: Found, mode: LayerMode, offloader: Offloader | None, counts: Counts, cached: bool
) -> LayerReport:
    """Gives a layer a forward of this mode. cached: its calls have filled key/value caches."""
    name, layer, family = found
    if mode.keep is None:
        return replace(as_it_was(model, name, layer, family, counts), mode=mode)
    text = Mode(keep_text(mode.keep), mode.scratch or 0)
    before = vars(layer).get("forward") if patched(layer) else None
    report = describe(model, name, layer, family if before is None else None, text, counts)
    if cached:
        report = replace(report, path="original", reason=PREFIX, after=report.before)
    kept = "keep does not apply" if report.path == "generic" and not text.inputs_alone else ""
    why = filter(None, (report.reason, kept, wrapper_note(model, name, text)))
    report = replace(report, reason="; ".join(why), mode=mode)
    layer.forward = ConvertedForward(layer, report.family, text, before, offloader)
    vars(layer)[REPLICATE] = NotReplicated()
    return report


def _take_out(layer: nn.Module) -> bool:
    """Gives a layer the forward back that it had; whether it had another."""
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
    return bool(places)


def revert(model: nn.Module) -> int:
    """Undoes `convert`: every layer gets the forward back that it had. Returns how many layers were converted."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    count = 0
    for layer in model.modules():
        head_forward.take_out(layer)
        count += _take_out(layer)
    return count

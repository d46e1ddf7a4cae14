"""A policy put into the layers of a model, and taken out again."""

from __future__ import annotations

from dataclasses import replace
from types import MethodType
from typing import Any

from torch import nn

from ckptfused.compat.accelerate import BELOW_HOOKS
from ckptfused.layer.peft import given_caches
from ckptfused.layer.shards import is_flattened, is_fully_sharded, refuse_tensor_parallel
from ckptfused.layer.source import patched
from ckptfused.layer.spec_text import Mode, keep_text
from ckptfused.models import find
from ckptfused.models.describe.counts import Counts
from ckptfused.models.describe.layers import (
    as_it_was,
    describe,
    generic_blocks,
    input_bytes,
    offload_note,
    with_head_note,
)
from ckptfused.models.family import Family
from ckptfused.models.forward import ConvertedForward
from ckptfused.models.heads import lm_heads, loss_forward
from ckptfused.models.hf_checkpointing import NOT_REPLICATED, REPLICATE, NotReplicated
from ckptfused.models.layer_mode import LayerMode
from ckptfused.models.policy import CheckpointPolicy
from ckptfused.models.ranks import agreed
from ckptfused.models.report import HeadReport, LayerReport, Report, changed, uncounted
from ckptfused.models.wrapper import wrapper_note
from ckptfused.offload import Offloader
from ckptfused.recompute.joined_calls import Segment

Found = tuple[str, nn.Module, Family | None]

_TOUCHED = ("forward", BELOW_HOOKS, REPLICATE)
PREFIX = "prefix tuning: each call has a filled key/value cache, with which a layer runs as it was"


def apply(model: nn.Module, policy: CheckpointPolicy, process_group: Any = None) -> Report:
    """Has a model run as the policy says, and as no other said before; `convert` says more.

    **Raises** as `convert`; the model is then as it was.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.DataParallel):
        raise ValueError(f"model: {NOT_REPLICATED}")
    found, language_models = list(find.layers(model)), list(lm_heads.models(model))
    touched = [*(layer for _, layer, _ in found), *(inner for _, inner in language_models)]
    held = [(module, {key: vars(module)[key] for key in _TOUCHED if key in vars(module)}) for module in touched]

    def both() -> Report:
        for _, inner in language_models:
            loss_forward.take_out(inner)
        asked = () if policy.loss is None else language_models
        made = tuple(_loss(name, inner, policy.loss_scratch) for name, inner in asked)
        report = _layers(model, found, policy)
        if any(head.path == "chunked" for head in made):
            return replace(report, heads=made)
        return replace(report, heads=made, notes=with_head_note(model, report))  # type: ignore[arg-type]

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
    why = loss_forward.put_in(model, scratch)
    kind = type(model).__name__
    return HeadReport(name, kind, "chunked") if why is None else HeadReport(name, kind, "original", why.text)


def _layers(model: nn.Module, found: list[Found], policy: CheckpointPolicy) -> Report:
    sharded = any(map(is_fully_sharded, model.modules()))
    for name, layer, _ in found:
        refuse_tensor_parallel(layer, name, sharded)
    modes = policy.modes(len(found))
    offloader = Offloader() if any(mode.offload for mode in modes) else None
    segments, divided = _segments(found, policy)
    reports, counts, cached = [], Counts(), set(given_caches(model))
    for one, mode, segment in zip(found, modes, segments, strict=True):
        _take_out(one[1])
        taken = offloader if mode.offload else None
        reports.append(_put_in(model, one, mode, taken, segment, counts, one[1] in cached))
    moved = [one for one, mode in zip(found, modes, strict=True) if mode.offload]
    notes = (*generic_blocks(model), *(offload_note(moved) if moved else ()), *divided)
    return Report(tuple(reports), policy, notes)


def _segments(found: list[Found], policy: CheckpointPolicy) -> tuple[list[Segment | None], tuple[str, ...]]:
    """The segment of each layer, and what the report says of them."""
    if not policy.is_divided or not found:
        return [None] * len(found), ()
    if any(is_flattened(layer) for _, layer, _ in found):
        said = "segments: each layer saves its own input, since FSDP1 or ZeRO-3 holds the weights; use FSDP2"
        return [None] * len(found), (said,)
    segments: list[Segment | None] = []
    for length in policy.lengths(len(found)):
        names = [name for name, _, _ in found[len(segments) : len(segments) + length]]
        alone = length == 1 and policy.segment_lengths is not None
        segments += [None if alone else Segment(names)] * length
    starts = dict.fromkeys(segment.names[0] for segment in segments if segment is not None)
    return segments, (f"segments, which save one input each, begin at {', '.join(starts)}",)


def _put_in(
    model: nn.Module,
    found: Found,
    mode: LayerMode,
    offloader: Offloader | None,
    segment: Segment | None,
    counts: Counts,
    cached: bool,
) -> LayerReport:
    """Gives a layer a forward of this mode. cached: its calls have filled key/value caches."""
    name, layer, family = found
    before = vars(layer).get("forward") if patched(layer) else None
    family = None if before is not None else family
    if mode.keep is None:
        report, text = as_it_was(model, name, layer, family, counts), None
    else:
        text = Mode(keep_text(mode.keep), mode.scratch or 0)
        report = describe(model, name, layer, family, text, counts)
        if cached:
            report = changed(report, path="original", reason=PREFIX, after=uncounted(report)["before"])
        kept = ""
        if report.path == "generic" and not text.inputs_alone:
            kept = "keep does not apply"
        elif segment is not None and name == segment.names[-1] and report.path == "fused" and not text.inputs_alone:
            text, kept = text._replace(keep="inputs"), "keeps its input alone: its replay is followed by its backward"
        why = filter(None, (report.reason, kept, wrapper_note(model, name, text)))
        report = changed(report, reason="; ".join(why))
    if segment is not None and not cached:
        after = input_bytes(model, name, layer, family) if name == segment.names[0] else 0.0
        report = changed(report, after=after)
    if text is not None or segment is not None:
        taken = None if text is None else report.family
        layer.forward = ConvertedForward(layer, taken, text, before, offloader, segment, name)
        vars(layer)[REPLICATE] = NotReplicated()
    return changed(report, mode=mode)


def _take_out(layer: nn.Module) -> bool:
    """Gives a layer the forward back that it had; whether it had another."""
    if isinstance(vars(layer).get(REPLICATE), NotReplicated):
        del vars(layer)[REPLICATE]
    places = [key for key in (BELOW_HOOKS, "forward") if isinstance(vars(layer).get(key), ConvertedForward)]
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
    """Undoes `convert`: every layer gets the forward back that it had. Returns how many layers were converted.

    **Raises** `TypeError` if `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    count = 0
    for layer in model.modules():
        loss_forward.take_out(layer)
        count += _take_out(layer)
    return count

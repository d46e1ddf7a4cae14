"""`convert` and `revert`."""

from __future__ import annotations

from dataclasses import replace
from types import MethodType
from typing import Any

from torch import nn

from ckptfused.convert import find, head_forward, heads
from ckptfused.convert.agree import agreed
from ckptfused.convert.counts import Counts
from ckptfused.convert.describe import describe, generic_blocks, head_note, offload_note
from ckptfused.convert.family import Family
from ckptfused.convert.forward import ConvertedForward
from ckptfused.convert.own_checkpoint import NOT_REPLICATED, REPLICATE, NotReplicated
from ckptfused.convert.report import HeadReport, Report
from ckptfused.convert.wrapper import wrapper_note
from ckptfused.layer.peft import given_caches
from ckptfused.layer.shards import is_fully_sharded, refuse_tensor_parallel
from ckptfused.layer.source import patched
from ckptfused.layer.texts import Policy, keep_text
from ckptfused.offload import Offloader
from ckptfused.sizes import parse_bytes
from ckptfused.spec import Keep, check_names
from ckptfused.spec.checks import check_choice, check_flag

# Where accelerate keeps the forward that it put hooks around.
_BELOW_HOOKS = "_old_forward"
_OURS = ("forward", REPLICATE)  # what convert puts into a layer
LOSSES = ("chunked",)
PREFIX = "prefix tuning: each call has a filled key/value cache, with which a layer runs as it was"


def convert(
    model: nn.Module,
    keep: Keep = "inputs",
    *,
    loss: str | None = None,
    scratch: int | str | None = None,
    offload: bool = False,
    process_group: Any = None,
) -> Report:
    """Turns an existing model into a fused-checkpoint model, in place.

    Each layer gets a `forward` of its own, as an attribute of the instance; its class, parameters, submodules,
    hooks and `state_dict` stay as they are. A layer that an adapter reads runs as one fused op that saves its
    input; any other is checkpointed with `ckptfused.checkpoint`. What is safe is decided at each call: with a
    key/value cache, or where attention weights are asked for, a layer runs as it was. A second `convert` changes
    what is kept. `revert` undoes it.

    keep: what each layer keeps for backward beside its input: a preset or names (`ckptfused.spec.KEEP_PRESETS`).
    loss: "chunked" has Hugging Face's language models make their loss without ever holding the logits
    (`ckptfused.linear_cross_entropy`), in training where labels are given; `outputs.logits` is then None. Evaluation,
    generation, `logits_to_keep` and loss functions of your own run as they did. None: as they were.
    scratch: bytes that the hidden-wide values of a layer's FFN may take at a time in backward, and so the logits of a
    chunked loss; more of them go in tiles. An int or "64MiB"; None: by device (docs/keep.md).
    offload: the input that each layer saves goes to host memory while the next layers run, and comes back a layer ahead
    of its use (docs/keep.md); the last layer's stays, and so does what is on the CPU.
    process_group: a `torch.distributed` group, or True for the default one; the call is then a collective which
    checks that all ranks convert alike. None: no communication.

    **Saves** in each fused layer x, what `keep` names, 16 bytes of random state where it has dropout.
    **Recomputes** the rest in backward.
    **Raises** `ValueError` for an unknown `keep`, `loss` or `scratch`, for tensor-parallel weights and
    `nn.DataParallel`, and, with `process_group`, where ranks differ; `TypeError` if `model` is no module. The model is
    then as it was.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.DataParallel):
        raise ValueError(f"model: {NOT_REPLICATED}")
    policy = Policy(keep_text(keep), 0 if scratch is None else parse_bytes("scratch", scratch))
    check_names(keep if isinstance(keep, str) else tuple(keep))
    if loss is not None:
        check_choice("loss", loss, LOSSES)
    offloader = Offloader() if check_flag("offload", offload) else None
    found, language_models = list(find.layers(model)), list(heads.models(model))
    touched = [*(layer for _, layer, _ in found), *(inner for _, inner in language_models)]
    held = [(module, {key: vars(module)[key] for key in _OURS if key in vars(module)}) for module in touched]

    def both() -> Report:
        for _, inner in language_models:
            head_forward.take_out(inner)
        asked = () if loss is None else language_models
        made = tuple(_convert_loss(name, inner, policy.scratch or None) for name, inner in asked)
        report = _convert(model, found, policy, offloader)
        notes = () if any(head.path == "chunked" for head in made) else head_note(model, report.layers)
        return replace(report, heads=made, notes=(*report.notes, *notes))

    try:
        if process_group is None:
            return both()
        return agreed(both, None if process_group is True else process_group)
    except Exception:
        for module, attributes in held:
            for key in _OURS:
                vars(module).pop(key, None)
            vars(module).update(attributes)
        raise


def _convert_loss(name: str, model: nn.Module, scratch: int | None) -> HeadReport:
    why = head_forward.put_in(model, scratch)
    kind = type(model).__name__
    return HeadReport(name, kind, "chunked") if why is None else HeadReport(name, kind, "original", why.text)


def _convert(
    model: nn.Module, found: list[tuple[str, nn.Module, Family | None]], policy: Policy, offloader: Offloader | None
) -> Report:
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
        report = describe(model, name, layer, family if before is None else None, policy, counts)
        if layer in cached:
            report = replace(report, path="original", reason=PREFIX, after=report.before)
        why = filter(None, (report.reason, wrapper_note(model, name, policy)))
        reports.append(replace(report, reason="; ".join(why)))
        layer.forward = ConvertedForward(layer, reports[-1].family, policy, before, offloader)
        vars(layer)[REPLICATE] = NotReplicated()
    notes = (*generic_blocks(model), *(offload_note(found) if offloader is not None else ()))
    return Report(tuple(reports), policy.keep, notes, scratch=policy.scratch)


def revert(model: nn.Module) -> int:
    """Undoes `convert`: every layer gets the forward back that it had. Returns how many layers were converted."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    count = 0
    for layer in model.modules():
        head_forward.take_out(layer)
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

"""A policy put into the layers of a model, and taken out again."""

from __future__ import annotations

from types import MethodType
from typing import Any, NamedTuple

from torch import nn

from ckptfused.compat import quantizers
from ckptfused.compat.accelerate import BELOW_HOOKS
from ckptfused.layer.hooks import watched
from ckptfused.layer.parts import Reason
from ckptfused.layer.peft import given_caches
from ckptfused.layer.shards import is_flattened, is_fully_sharded, refuse_tensor_parallel
from ckptfused.layer.source import is_patched
from ckptfused.layer.spec_text import Mode, keep_text
from ckptfused.models import find
from ckptfused.models.derive.calls import IN_SHARDS, forget
from ckptfused.models.derive.family import DERIVED
from ckptfused.models.derive.recording.record import RAISED
from ckptfused.models.describe.example import KnownTables, example, with_values
from ckptfused.models.experts import install as experts
from ckptfused.models.experts.read import has_experts
from ckptfused.models.family import Family, Outcome
from ckptfused.models.forward import ConvertedForward
from ckptfused.models.heads import lm_heads, loss_forward
from ckptfused.models.hf_checkpointing import NOT_REPLICATED, REPLICATE, NotReplicated
from ckptfused.models.layer_mode import LayerMode
from ckptfused.models.policy import CheckpointPolicy
from ckptfused.models.ranks import agree
from ckptfused.models.release import end_releases
from ckptfused.models.report import HeadReport
from ckptfused.models.wrapper import wrapper_note
from ckptfused.offload import Offloader
from ckptfused.recompute.joined_calls import Segment

Found = tuple[str, nn.Module, Family | None]

_TOUCHED = ("forward", BELOW_HOOKS, REPLICATE, "config", "support_avx512bf16_for_cpu")
PREFIX = Reason("prefix tuning: each call has a filled key/value cache, with which a layer runs as it was")
AS_IT_WAS = Reason("as it was, says the policy")
PATCHED = Reason("its forward is not its class's (patched or offloaded)")


class InstalledLayer(NamedTuple):
    """One layer, and what will become of its calls."""

    name: str
    layer: nn.Module
    family: Family | None
    """The adapter that reads it."""
    outcome: Outcome | Reason
    reason: str
    mode: LayerMode
    segment: Segment | None

    @property
    def path(self) -> str:
        """One of those that `LayerReport.path` lists."""
        if isinstance(self.outcome, Outcome):
            return self.outcome.path
        return "original" if self.outcome is PREFIX or self.mode.keep is None else "generic"


class Installed(NamedTuple):
    """A policy as it was put into a model. `describe` makes a report of it."""

    layers: tuple[InstalledLayer, ...]
    heads: tuple[HeadReport, ...]
    policy: CheckpointPolicy
    notes: tuple[str, ...]

    @property
    def for_other_ranks(self) -> dict[str, str]:
        """What all ranks have to agree on, by what it is of."""
        found = {f"layer {x.name}": _in_words(x) for x in self.layers}
        found |= {f"the loss of {x.name}": f"{x.model}: {x.path}" for x in self.heads}
        return found | {"the policy": str(self.policy)}


def _in_words(one: InstalledLayer) -> str:
    return f"{type(one.layer).__name__}: {one.path} by {one.family and one.family.name}, {one.mode}"


def install(model: nn.Module, policy: CheckpointPolicy, process_group: Any = None) -> Installed:
    """Has a model run as the policy says, and as no other said before; `convert` says more.

    **Raises** as `convert`; the model is then as it was.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.DataParallel):
        raise ValueError(f"model: {NOT_REPLICATED}")
    found, language_models = list(find.layers(model)), list(lm_heads.models(model))
    touched = [*(layer for _, layer, _ in found), *(inner for _, inner in language_models)]
    touched += filter(experts.is_changed, model.modules())
    touched += [*lm_heads.final_norms(language_models), *quantizers.four_bit_layers(model)]
    held = [(module, {key: vars(module)[key] for key in _TOUCHED if key in vars(module)}) for module in touched]

    def both() -> Installed:
        for module in model.modules():
            loss_forward.take_out(module)
        quantizers.never_pack(model)
        quantizers.end_caches(model)
        asked = () if policy.loss is None else language_models
        heads = tuple(_loss(name, inner, policy.loss_scratch) for name, inner in asked)
        layers, notes = _layers(model, found, policy)
        quantizers.refuse_gradients_of_packed(model)
        return Installed(layers, heads, policy, notes)

    try:
        if process_group is None:
            return both()
        return agree(both, lambda done: done.for_other_ranks, None if process_group is True else process_group)
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


def _layers(
    model: nn.Module, found: list[Found], policy: CheckpointPolicy
) -> tuple[tuple[InstalledLayer, ...], tuple[str, ...]]:
    sharded = any(map(is_fully_sharded, model.modules()))
    for name, layer, _ in found:
        refuse_tensor_parallel(layer, name, sharded, experts.is_experts)
    modes = policy.modes(len(found))
    offloader = Offloader() if any(mode.offload for mode in modes) else None
    segments, notes = _segments(found, policy)
    made, cached = [], set(given_caches(model))
    tables: KnownTables = {}
    for module in model.modules():
        experts.revert_experts(module)
    as_they_were = {
        inner
        for (_, layer, _), mode in zip(found, modes, strict=True)
        if mode.keep is None
        for inner in layer.modules()
    }
    notes += experts.convert_experts(
        {name: module for name, module in model.named_modules() if module not in as_they_were}
    )
    for one, mode, segment in zip(found, modes, segments, strict=True):
        _take_out(one[1])
        taken = offloader if mode.offload else None
        made.append(_put_in(model, one, mode, taken, segment, one[1] in cached, tables))
    return tuple(made), notes


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
    said = f"segments, which save one input each, begin at {', '.join(starts)}"
    if any(segment is not None and has_experts(one[1]) for one, segment in zip(found, segments, strict=True)):
        said += "; their replays ask the routers of experts again"
    return segments, (said,)


def _put_in(
    model: nn.Module,
    found: Found,
    mode: LayerMode,
    offloader: Offloader | None,
    segment: Segment | None,
    cached: bool,
    tables: KnownTables,
) -> InstalledLayer:
    """Gives a layer a forward of this mode. cached: its calls have filled key/value caches."""
    name, layer, family = found
    before = vars(layer).get("forward") if is_patched(layer) else None
    family = None if before is not None else family
    text: Mode | None = None
    outcome: Outcome | Reason = AS_IT_WAS if before is None else PATCHED
    why = AS_IT_WAS.text
    if mode.keep is not None:
        text = Mode(keep_text(mode.keep), mode.scratch or 0)
        if cached:
            outcome = PREFIX
        elif before is None:
            family, outcome = _taken(model, found, text, tables)
        kept = ""
        if isinstance(outcome, Reason):
            kept = "" if cached or text.inputs_alone else "keep does not apply"
        elif segment is not None and name == segment.names[-1] and not (outcome.generic or text.inputs_alone):
            text, kept = text._replace(keep="inputs"), "keeps its input alone: its replay is followed by its backward"
        said = outcome.text if isinstance(outcome, Reason) else outcome.reason
        why = "; ".join(filter(None, (said, kept, wrapper_note(model, name, text))))
    if text is not None or segment is not None:
        # A derived layer's calls are looked at each, whatever became of the example.
        reads = family if family is not None and family.as_read(layer) else DERIVED
        taken = None if text is None or before is not None else reads.name
        layer.forward = ConvertedForward(layer, taken, text, before, offloader, segment, name)
        vars(layer)[REPLICATE] = NotReplicated()
    return InstalledLayer(name, layer, family, outcome, why, mode, segment)


def _taken(model: nn.Module, found: Found, mode: Mode, tables: KnownTables) -> tuple[Family | None, Outcome | Reason]:
    """The family by which a layer runs that is not converted at this moment, and what will become of its calls."""
    name, layer, family = found
    outcome = _outcome(layer, family, mode)
    if not isinstance(outcome, Reason):
        return family, outcome
    try:
        derived = DERIVED.outcome_of(layer, mode, *with_values(*example(model, name, layer, tables)))
    except Exception:  # making an example for code that was not read
        derived = Reason(RAISED)
    if isinstance(derived, Outcome):
        return DERIVED, derived
    read = family is not None and family.as_read(layer)
    if derived.text.startswith((RAISED, IN_SHARDS)):
        return family if read else DERIVED, outcome._replace(
            text=f"{outcome.text}; what it takes is seen at its first call"
        )
    if read:  # its adapter says it better
        return family, outcome
    return family, outcome._replace(text=f"{outcome.text}; not derived: {derived.text}")


def _outcome(layer: nn.Module, family: Family | None, mode: Mode) -> Outcome | Reason:
    """What will become of calls of a layer that is not converted at this moment."""
    if family is None:
        return Reason("no adapter for this class")
    if not family.as_read(layer):  # nothing is known of where its parts are
        return family.unread(layer)
    if is_flattened(layer):
        within = (module for module in layer.modules() if module is not layer)
        why = next(filter(None, map(watched, within)), None)  # DeepSpeed's ZeRO-3
        return why or Outcome((), reason="in shards now (FSDP, ZeRO-3); decided at each call")
    return family.outcome(layer, mode)


def _take_out(layer: nn.Module) -> bool:
    """Gives a layer the forward back that it had; whether it had another."""
    forget(layer)
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
    """Undoes `convert`: every layer gets the forward back that it had, and the optimizer's step updates all weights
    again. Returns how many layers were converted.

    **Raises** `TypeError` if `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    end_releases(model)
    quantizers.as_bitsandbytes_does(model)
    count = 0
    for layer in model.modules():
        loss_forward.take_out(layer)
        experts.revert_experts(layer)
        count += _take_out(layer)
    return count

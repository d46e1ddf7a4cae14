"""What will become of a layer, known before it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ckptfused import cost
from ckptfused.layer.hooks import hooked, watched
from ckptfused.layer.parts import Reason
from ckptfused.layer.projections import projection
from ckptfused.layer.shards import holds_fsdp1, is_flattened
from ckptfused.layer.source import patched
from ckptfused.layer.spec_text import Mode
from ckptfused.models.describe.counts import Counts
from ckptfused.models.describe.example import example
from ckptfused.models.describe.saved_bytes import TOKENS
from ckptfused.models.family import Family, lacking
from ckptfused.models.heads.lm_heads import head_of
from ckptfused.models.report import Bytes, LayerReport, Report, changed, uncounted
from ckptfused.modules.fused import FusedModule


def describe(
    model: nn.Module, name: str, layer: nn.Module, family: Family | None, mode: Mode, counts: Counts
) -> LayerReport:
    """The report on one layer of a model, not converted at this moment."""
    kind = type(layer).__name__
    if family is None and patched(layer):
        return LayerReport(name, kind, None, "generic", "its forward is not its class's (patched or offloaded)")
    if family is None or not family.as_read(layer):  # nothing is known of where its parts are
        unread = "no adapter for this class" if family is None else family.unread(layer).text
        sizes = _without_adapter(model, name, layer, counts)
        return LayerReport(name, kind, None if family is None else family.name, "generic", unread, *sizes)
    if is_flattened(layer):
        for module in layer.modules():
            if module is not layer and (why := watched(module)) is not None:  # DeepSpeed's ZeRO-3
                return LayerReport(name, kind, family.name, "generic", why.text)
        return LayerReport(name, kind, family.name, "fused", "in shards now (FSDP, ZeRO-3); decided at each call")
    try:
        x = _example(layer, family)
    except AttributeError as error:
        return LayerReport(name, kind, family.name, "generic", lacking(error).text)
    before = None
    if _can_be_traced(layer):
        with contextlib.suppress(Exception):  # a count for the table
            before = counts.of(layer, *family.example(layer, x))
    outcome = family.outcome(layer, mode, x)
    if isinstance(outcome, Reason):
        return LayerReport(name, kind, family.name, "generic", outcome.text, before, x.size(-1) * x.element_size())
    after = sum(cost.saved_bytes(spec, 1, TOKENS, x.size(-1), x.dtype) for spec in outcome.specs) / TOKENS
    after += outcome.generic * x.size(-1) * x.element_size()
    return LayerReport(name, kind, family.name, outcome.path, outcome.reason, before, after)


def as_it_was(model: nn.Module, name: str, layer: nn.Module, family: Family | None, counts: Counts) -> LayerReport:
    """The report on a layer that is not converted."""
    report = describe(model, name, layer, None if patched(layer) else family, Mode(), counts)
    return changed(report, path="original", reason="as it was, says the policy", after=uncounted(report)["before"])


def input_bytes(model: nn.Module, name: str, layer: nn.Module, family: Family | None) -> float | None:
    """Bytes a token of a layer's input; None where it is not known."""
    try:
        x = (
            _example(layer, family)
            if family is not None and family.as_read(layer)
            else example(model, name, layer)[0][0]
        )
    except Exception:  # as in `_without_adapter`
        return None
    return x.size(-1) * x.element_size()


def _without_adapter(model: nn.Module, name: str, layer: nn.Module, counts: Counts) -> tuple[Bytes, Bytes]:
    """Bytes a token before and after for a layer of which only the forward's signature is known; None where that is not
    enough to call it."""
    if not _can_be_traced(layer):
        return None, None
    try:
        (x,), kwargs = example(model, name, layer, counts.tables)
        before, after = counts.of(layer, (x,), kwargs), x.size(-1) * x.element_size()
    except Exception:  # as of any code that was not read
        return None, None
    return before, lambda: None if before() is None else after  # else x was guessed wrong


def _example(layer: nn.Module, family: Family) -> Tensor:
    """An x that the layer could be called with: [1, TOKENS, C]."""
    parts = family.parts(layer)
    module = parts.ffn.down if parts.ffn is not None else parts.attn.o  # type: ignore[union-attr]
    last = projection(module)
    if isinstance(last, Reason):
        floats = [p for p in layer.parameters() if p.is_floating_point()]
        first = floats[0] if floats else torch.empty(0)
        # A quantised weight has neither the width nor the type of what it stands for.
        width, dtype, device = getattr(module, "out_features", first.size(-1)), first.dtype, first.device
    else:
        width, dtype, device = last.out_features, last.weight.dtype, last.weight.device
    return torch.empty(1, TOKENS, width, dtype=dtype, device=device, requires_grad=True)


def _can_be_traced(layer: nn.Module) -> bool:
    """Whether a layer's forward may be called on fake tensors: not where hooks inside would be called, nor where
    quantised projections (bitsandbytes) or FSDP1's shards inside would take the fake weights into their own state.
    """
    inside = (module for module in layer.modules() if module is not layer)
    if any(map(hooked, inside)) or holds_fsdp1(layer):
        return False
    return all(p.is_floating_point() for p in layer.parameters())


def generic_blocks(model: nn.Module) -> tuple[str, ...]:
    """Which of ckptfused's own modules in a model run generically, and why."""
    blocks: dict[tuple[str, str], list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FusedModule) and (why := module.generic_reason()) is not None:
            blocks.setdefault((type(module).__name__, why), []).append(name)
    return tuple(f"{', '.join(names)}: {kind} runs generically ({why})" for (kind, why), names in blocks.items())


def offload_note(layers: Iterable[tuple[str, nn.Module, Family | None]]) -> tuple[str, ...]:
    """Where the inputs of layers are between forward and backward, if they are to be offloaded."""
    devices = {p.device.type for _, layer, _ in layers for p in layer.parameters()}
    where = "" if "cuda" in devices else "nothing moves on the CPU; on a GPU, "
    return (f"offload: {where}inputs of all layers but the last wait for backward in host memory.",)


def with_head_note(model: Any, report: Report) -> Callable[[], tuple[str, ...]]:
    """What makes a report's notes, with one where the logits outweigh what all layers save."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor) or not report.layers:  # PyTorch's quantised layers have a method
        return lambda: report.notes
    # Logits in the model's type, a float32 copy for the loss, and its log-softmax kept for backward.
    size, logits = weight.size(0), weight.size(0) * (weight.element_size() + 8)
    hint = ' convert(model, loss="chunked") takes them away.' if any(map(head_of, model.modules())) else ""

    def notes() -> tuple[str, ...]:
        saved = [layer.after for layer in report.layers]
        total = sum(bytes for bytes in saved if bytes is not None)
        if None in saved or logits <= total:
            return report.notes
        return (
            *report.notes,
            f"The loss head sets the peak: {size:,} logits hold about {logits:,} bytes a token, all layers "
            f"together {total:,.0f}.{hint}",
        )

    return notes

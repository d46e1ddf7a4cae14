"""The report on what was installed: its bytes are counted when they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ckptfused import cost
from ckptfused.cost.open_ledger import OpenLedger
from ckptfused.layer.hooks import hooked
from ckptfused.layer.parts import Reason
from ckptfused.layer.shards import holds_fsdp1, is_flattened
from ckptfused.models.derive.family import DERIVED
from ckptfused.models.describe.counts import Counts
from ckptfused.models.describe.example import example
from ckptfused.models.describe.own_forward import in_training
from ckptfused.models.experts.adapters import wrapped
from ckptfused.models.experts.install import is_converted
from ckptfused.models.experts.routing import beside_experts, saves_input_alone
from ckptfused.models.family import EXAMPLE_TOKENS, Outcome
from ckptfused.models.from_input import may_keep_input_alone
from ckptfused.models.heads.lm_heads import head_of
from ckptfused.models.install import PATCHED, PREFIX, Installed, InstalledLayer
from ckptfused.models.report import Bytes, LayerReport, Report
from ckptfused.modules.fused import FusedModule
from ckptfused.recompute.made_again import MadeAgain


def describe(model: nn.Module, installed: Installed) -> Report:
    """What `convert` says of the layers of a model as they are now."""
    counts = Counts()
    layers = tuple(_layer(model, one, counts) for one in installed.layers)
    moved = [one.layer for one in installed.layers if one.mode.offload]
    notes: Any = (*_generic_blocks(model), *_offload_note(moved), *installed.notes)
    if not any(head.path == "chunked" for head in installed.heads):
        notes = _with_head_note(model, layers, notes)
    return Report(layers, installed.policy, notes, installed.heads)


def _layer(model: nn.Module, one: InstalledLayer, counts: Counts) -> LayerReport:
    family = None if one.family is None else one.family.name
    before, after = _bytes(model, one, counts)
    kind = type(one.layer).__name__
    return LayerReport(one.name, kind, family, one.path, one.reason, before, after, one.mode)


def _bytes(model: nn.Module, one: InstalledLayer, counts: Counts) -> tuple[Bytes, Bytes]:
    """Bytes a token that a layer saves as it was, and as it is installed; None where they are not known."""
    layer, outcome = one.layer, one.outcome
    is_read = one.family not in (None, DERIVED) and one.family.as_read(layer)  # type: ignore[union-attr]
    before: Bytes = None
    try:
        call = one.family.example_call(layer) if is_read else example(model, one.name, layer, counts.tables)  # type: ignore[union-attr]
        if outcome is not PATCHED and _can_be_traced(layer):
            before = counts.of(layer, *call)
    except Exception:  # as in any code that was not read
        call = None
    x = None if call is None else call[0][0]
    each: Any = None if x is None else x.size(-1) * x.element_size()
    if one.segment is not None and outcome is not PREFIX:
        return before, each if one.name == one.segment.names[0] else 0.0
    if one.path == "original":
        return before, before
    routed = any(map(is_converted, layer.modules()))
    if x is None or outcome is PATCHED or is_flattened(layer) or (routed and isinstance(outcome, Reason)):
        return before, None
    if not isinstance(outcome, Reason):
        fused = [cost.saved_bytes(spec, 1, EXAMPLE_TOKENS, x.size(-1), x.dtype) for spec in outcome.specs]
        if routed:
            return before, _with_routing(one, outcome, x, sum(fused) / EXAMPLE_TOKENS, counts)
        again = 0
        if _in_training(may_keep_input_alone, layer, x):
            again, fused = outcome.made_again, fused[:-1] if outcome.joined else fused
        return before, sum(fused) / EXAMPLE_TOKENS + (outcome.generic - again) * each
    # Of a class that was not read, x was guessed: wrongly, where its forward fails.
    return before, each if is_read else before and (lambda: None if before() is None else each)


def _with_routing(one: InstalledLayer, outcome: Outcome, x: Tensor, fused: float, counts: Counts) -> Bytes:
    """Bytes a token of a layer whose router and experts run once. fused: those of its fused half."""
    layer, each = one.layer, x.size(-1) * x.element_size()
    block: nn.Module = next(m for m in layer.modules() if any(is_converted(wrapped(inner)) for inner in m.children()))
    if block is layer or any(beside_experts(block)) or not _can_be_traced(block):
        return None
    alone = len(outcome.specs) == outcome.generic == 1 and _in_training(saves_input_alone, layer, x)
    # The mixture's own input is made again, and so is, of the layer's, the fused half's result, or that is kept.
    once = alone and outcome.made_again > 0
    beside = fused - each if once else fused + (0 if alone else outcome.generic * each)
    count = counts.of(_FromInput(block) if alone else block, (x,), {})

    def total() -> float | None:
        with OpenLedger():  # as converted
            found = count()
        return None if found is None else beside + found

    return total


def _in_training(asked: Callable[[nn.Module, Tensor], bool], layer: nn.Module, x: Tensor) -> bool:
    with OpenLedger(), in_training():
        return asked(layer, x)


class _FromInput(nn.Module):
    """A mixture's module as a layer runs it that keeps x alone, of which its input is made."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Any:
        """What the mixture makes of an input that is made of x."""
        again = MadeAgain()
        with again.at_work():
            y = self.block(x * 1)
        again.settle()
        again.end()
        return y


def _can_be_traced(layer: nn.Module) -> bool:
    """Whether a layer's forward may be called without data: not where hooks inside would be called, nor where
    quantised projections (bitsandbytes) or FSDP1's shards inside would take the weights into their own state.
    """
    inside = (module for module in layer.modules() if module is not layer)
    if any(map(hooked, inside)) or holds_fsdp1(layer) or is_flattened(layer):
        return False
    return all(p.is_floating_point() for p in layer.parameters())


def _generic_blocks(model: nn.Module) -> tuple[str, ...]:
    """Which of ckptfused's own modules in a model run generically, and why."""
    blocks: dict[tuple[str, str], list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FusedModule) and (why := module.generic_reason()) is not None:
            blocks.setdefault((type(module).__name__, why), []).append(name)
    return tuple(f"{', '.join(names)}: {kind} runs generically ({why})" for (kind, why), names in blocks.items())


def _offload_note(layers: list[nn.Module]) -> tuple[str, ...]:
    """Where the inputs of these layers are between forward and backward."""
    if not layers:
        return ()
    devices = {p.device.type for layer in layers for p in layer.parameters()}
    where = "" if "cuda" in devices else "nothing moves on the CPU; on a GPU, "
    return (f"offload: {where}inputs of all layers but the last wait for backward in host memory.",)


def _with_head_note(
    model: Any, layers: tuple[LayerReport, ...], known: tuple[str, ...]
) -> Callable[[], tuple[str, ...]]:
    """What makes a report's notes, with one where the logits outweigh what all layers save."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor) or not layers:  # PyTorch's quantised layers have a method
        return lambda: known
    # Logits in the model's type, a float32 copy for the loss, and its log-softmax kept for backward.
    size, logits = weight.size(0), weight.size(0) * (weight.element_size() + 8)
    hint = ' convert(model, loss="chunked") takes them away.' if any(map(head_of, model.modules())) else ""

    def notes() -> tuple[str, ...]:
        saved = [layer.after for layer in layers]
        total = sum(bytes for bytes in saved if bytes is not None)
        if None in saved or logits <= total:
            return known
        return (
            *known,
            f"The loss head sets the peak: {size:,} logits hold about {logits:,} bytes a token, all layers "
            f"together {total:,.0f}.{hint}",
        )

    return notes

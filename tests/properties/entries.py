"""The one table of entry points: every way into the library that a promise of docs/how-it-works.md is tested on."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptfused
from ckptfused import (
    CheckpointPolicy,
    FusedCheckpointAttention,
    FusedCheckpointBlock,
    FusedCheckpointFFN,
    FusedCheckpointSequential,
    functional,
)
from ckptfused.loss import HeadAdapter
from ckptfused.spec import BlockSpec
from tests.devices import repeatable

B, T, C, H, HIDDEN = 2, 6, 16, 4, 24
CLASSES = 19
Function = Callable[[Tensor], Tensor]


@dataclass
class Call:
    """One entry point, ready to be called on an x [B, T, C]."""

    module: nn.Module
    """What holds the parameters, and the rates of dropout."""
    run: Function
    kept: Function
    """The same of the same parameters with everything kept: nothing is made again for backward."""
    segments: tuple[tuple[BlockSpec, ...], ...] = ()
    """The fused calls of one forward, segment by segment; empty where plain PyTorch runs."""

    @property
    def leaves(self) -> list[Tensor]:
        return [p for p in self.module.parameters() if p.requires_grad]


class Own(nn.Module):
    """A layer that no adapter knows."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(C), nn.Linear(C, HIDDEN), nn.Linear(HIDDEN, C)
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(self.up(self.norm(x)).tanh()))


def softsign(x: Tensor) -> Tensor:
    """An activation that no kernel has."""
    return nn.functional.softsign(x)


def block(p: float, **options: Any) -> FusedCheckpointBlock:
    return FusedCheckpointBlock.llama(C, H, HIDDEN, num_kv_heads=2, dropout=p, **options)


def attention(p: float) -> FusedCheckpointAttention:
    return FusedCheckpointAttention(C, H, p, norm_first=True, batch_first=True)


def ffn(p: float, **options: Any) -> FusedCheckpointFFN:
    return FusedCheckpointFFN(
        C, HIDDEN, p, **{"activation": "gelu", "norm_first": True, "batch_first": True, **options}
    )


def plain_layer(p: float) -> nn.Module:
    return nn.TransformerEncoderLayer(C, H, HIDDEN, p, batch_first=True)


@contextlib.contextmanager
def everything_kept(*modules: Any) -> Iterator[None]:
    before = [module.keep for module in modules]
    for module in modules:
        module.keep = "all"
    yield
    for module, keep in zip(modules, before, strict=True):
        module.keep = keep


def _one_by_one(modules: list[Any], x: Tensor) -> Tensor:
    with everything_kept(*modules):
        for module in modules:
            x = module(x)
        return x


def _fused(module: Any) -> Call:
    return Call(module, module, partial(_one_by_one, [module]), ((module.spec(),),))


def _in_a_row(modules: list[Any], *sizes: int) -> Call:
    sequential = FusedCheckpointSequential(*modules, segments=len(sizes))
    specs = iter(module.spec() for module in modules)
    segments = tuple(tuple(itertools.islice(specs, size)) for size in sizes)
    return Call(sequential, sequential, partial(_one_by_one, modules), segments)


def _generic(module: Any, *masks: Any) -> Call:
    assert module.generic_reason() is not None
    return Call(module, module, lambda x: module._plain(x, *masks))


def _hooked(module: Any, layer: Callable[[Any], nn.Module], *masks: Any) -> Call:
    layer(module).register_forward_hook(lambda *_: None)
    return _generic(module, *masks)


def _converted(make: Callable[[float], nn.Module], p: float, path: str, **options: Any) -> Call:
    model = nn.Sequential(*(make(p) for _ in range(3)))
    reference = copy.deepcopy(model, {id(t): t for t in model.parameters()})
    report = ckptfused.convert(model, **options)
    assert {layer.path for layer in report.layers} == {path}
    if path == "generic":
        return Call(model, model, reference)
    ckptfused.convert(reference, "all")
    spec = FusedCheckpointBlock(C, H, HIDDEN, p, batch_first=True).spec()
    return Call(model, model, reference, ((spec,) * 3,) if options else ((spec,),) * 3)


def _of_plain_pytorch(modules: list[nn.Module], call: Callable[[nn.Module, Tensor], Tensor]) -> Call:
    module = nn.Sequential(*modules)
    return Call(module, lambda x: call(module, x), module)


def _functional(p: float) -> Call:
    made = block(p)
    spec = made.spec()
    names = {"attn.pre_w": made.norm1.weight, "attn.q_w": made.self_attn.in_proj_weight}
    names |= {"attn.o_w": made.self_attn.out_proj.weight, "ffn.pre_w": made.norm2.weight}
    names |= {"ffn.gate_w": made.linear1.weight, "ffn.down_w": made.linear2.weight}

    def call(x: Tensor, *, keep: str = "inputs") -> Tensor:
        cos, sin = made.self_attn.rotary(x.size(1), x)
        return functional.block(x, names, made.spec(x.dtype).with_keep(keep), cos=cos, sin=sin)

    return Call(made, call, partial(call, keep="all"), ((spec,),))


class Head(nn.Module):
    """A loss head with an adapter, whose input is dropped out."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.linear = nn.Linear(C, CLASSES)
        self.a, self.b = nn.Parameter(torch.randn(3, C) / 4), nn.Parameter(torch.randn(CLASSES, 3) / 4)
        self.dropout = nn.Dropout(p)
        self.register_buffer("target", torch.arange(B * T).view(B, T) % CLASSES)

    def forward(self, x: Tensor, keep: str = "inputs") -> Tensor:
        p = self.dropout.p if self.training else 0.0
        adapter = HeadAdapter(self.a, self.b, p=p)
        target = self.target[: x.size(0), : x.size(1)]
        loss = ckptfused.linear_cross_entropy(
            x, self.linear.weight, target, self.linear.bias, keep=keep, adapters=[adapter]
        )
        assert isinstance(loss, Tensor)
        return loss


def _loss(p: float) -> Call:
    head = Head(p)
    return Call(head, head, partial(head, keep="gradients"))


def _hugging_face(p: float) -> Call:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": C, "intermediate_size": HIDDEN, "vocab_size": CLASSES}
    config = LlamaConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=H, num_key_value_heads=2, attention_dropout=p
    )
    model = LlamaForCausalLM(config).train()
    model.model.embed_tokens.requires_grad_(False)  # x is in its place
    reference = copy.deepcopy(model, {id(t): t for t in model.parameters()})
    assert ckptfused.convert(model).fused == ckptfused.convert(reference, "all").fused == 2

    def call(model: Any, x: Tensor) -> Tensor:
        logits: Tensor = model(inputs_embeds=x, use_cache=False).logits
        return logits

    return Call(model, partial(call, model), partial(call, reference), ((block(p).spec(),),) * 2)


NO_MASKS = (None, None, False)
FUSED: dict[str, Callable[[float], Call]] = {
    "functional": _functional,
    "block": lambda p: _fused(block(p)),
    "post-norm block": lambda p: _fused(FusedCheckpointBlock(C, H, HIDDEN, p, batch_first=True)),
    "attention": lambda p: _fused(attention(p)),
    "ffn": lambda p: _fused(ffn(p)),
    "sequential": lambda p: _in_a_row([block(p), attention(p), ffn(p)], 1, 1, 1),
    "two segments": lambda p: _in_a_row([block(p), attention(p), ffn(p)], 1, 2),
    "one segment": lambda p: _in_a_row([block(p), block(p)], 2),
}
CONVERTED: dict[str, Callable[[float], Call]] = {
    "converted": lambda p: _converted(plain_layer, p, "fused"),
    "converted segment": lambda p: _converted(plain_layer, p, "fused", policy=CheckpointPolicy.segments(1)),
    "hugging face": _hugging_face,
}
GENERIC: dict[str, Callable[[float], Call]] = {
    "generic block": lambda p: _generic(
        FusedCheckpointBlock(C, H, HIDDEN, p, activation=softsign, batch_first=True), *NO_MASKS
    ),
    "hooked block": lambda p: _hooked(
        FusedCheckpointBlock(C, H, HIDDEN, p, batch_first=True), lambda b: b.linear1, *NO_MASKS
    ),
    "hooked attention": lambda p: _hooked(attention(p), lambda b: b.self_attn.out_proj, *NO_MASKS),
    "generic ffn": lambda p: _generic(ffn(p, activation=softsign)),
    "generic sequential": lambda p: _generic_in_a_row(p),
    "converted generic": lambda p: _converted(Own, p, "generic"),
    "converted generic segment": lambda p: _converted(Own, p, "generic", policy=CheckpointPolicy.segments(1)),
    "checkpoint": lambda p: _of_plain_pytorch([Own(p), Own(p)], lambda m, x: ckptfused.checkpoint(m, x)),
    "checkpoint_sequential": lambda p: _of_plain_pytorch(
        [Own(p) for _ in range(3)], lambda m, x: ckptfused.checkpoint_sequential(m, 3, x)
    ),
}
LOSS: dict[str, Callable[[float], Call]] = {"loss": _loss}
ENTRIES = {**FUSED, **CONVERTED, **GENERIC, **LOSS}
OURS = {**FUSED, **CONVERTED, **LOSS}
"""Entry points whose random numbers the library draws."""
PLAIN = {*GENERIC, "hugging face"}
"""Entry points with gradients of PyTorch's own: all, or those of a head that is not fused."""


def _generic_in_a_row(p: float) -> Call:
    parts: list[Any] = [ffn(p, activation=softsign) for _ in range(2)]
    sequential = FusedCheckpointSequential(*parts, segments=2)

    def kept(x: Tensor) -> Tensor:
        for part in parts:
            x = part._plain(x)
        return x

    return Call(sequential, sequential, kept)


CHANGED = r"modified by an inplace operation|was changed in place between forward and backward"
"""What is said where a tensor was changed that backward needs."""


def each(entries: dict[str, Callable[[float], Call]] = ENTRIES, **names: Any) -> Any:
    """A mark: the test runs for each of the entry points, with its name."""
    return pytest.mark.parametrize("name", entries, **names)


def made(name: str, p: float = 0.25, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 1) -> Call:
    """The call of an entry point, with norms and biases off their initial values."""
    repeatable(device)
    torch.manual_seed(seed)
    call = ENTRIES[name](p)
    with torch.no_grad():
        for parameter in call.module.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    call.module.to(device, dtype)
    return call


def source(device: str = "cpu", dtype: torch.dtype = torch.float32, batch: int = B, length: int = T) -> Tensor:
    values = torch.randn(batch, length, C, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return values.to(device, dtype).requires_grad_()


def step(call: Call, function: Function, x: Tensor, loss: Function = lambda y: y.sin().sum()) -> list[Tensor]:
    """The result and all gradients, of x first."""
    torch.manual_seed(7)
    y = function(x)
    return [y.detach(), *torch.autograd.grad(loss(y), wanted(call, x))]


def wanted(call: Call, x: Tensor) -> list[Tensor]:
    return [*([x] if x.requires_grad else []), *call.leaves]


def equal(got: list[Tensor], expected: list[Tensor]) -> bool:
    return len(got) == len(expected) and all(map(torch.equal, got, expected))

"""Which modules are layers: stages are looked into, whatever holds them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import SwinConfig, SwinModel

import ckptfused
from tests.models.compare import close, result

WIDTH = 16


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class WrittenOut(nn.Module):
    """A block without children."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.up).tanh() @ self.down


class Stage(nn.Module):
    """A stage as in timm's Swin, ConvNeXt, LeViT, MaxViT and CoAtNet."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.downsample, self.blocks = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)), blocks

    def forward(self, x: Tensor) -> Tensor:
        x = self.downsample(x)
        for block in self.blocks.values() if isinstance(self.blocks, nn.ModuleDict) else self.blocks:  # type: ignore
            x = block(x)
        return x


class Unit(nn.Module):
    """A product and its norm: no block by itself, whatever list it stands in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


class Units(nn.Module):
    """A residual block of such units, as ResNet's bottleneck."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.Sequential(Unit(), Unit(), Unit())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.units(x)


class Flat(nn.Module):
    """A block whose children have none, as Hugging Face's ConvNeXt and its ResNets."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Experts(nn.Module):
    """A layer: what repeats in it is called by parts of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(WIDTH), nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.stack([expert(self.norm(x)) for expert in self.experts]).sum(0)


class Routed(nn.Module):
    """A layer whose experts are blocks by themselves; a router has a row for each."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(Flat() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1).unbind(-1)
        return x + torch.stack([e(x) * p[:, None] for e, p in zip(self.experts, shares, strict=True)]).sum(0)


class NamedExperts(Routed):
    """The same, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.experts: Any = nn.ModuleDict({f"expert {i}": Flat() for i in range(4)})

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1).unbind(-1)
        return x + torch.stack([e(x) * p[:, None] for e, p in zip(self.experts.values(), shares, strict=True)]).sum(0)


class Attributes(nn.Module):
    """A model whose blocks stand in no container."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block0, self.block1 = nn.Linear(WIDTH, WIDTH), Flat(), Flat()

    def forward(self, x: Tensor) -> Tensor:
        return self.block1(self.block0(self.first(x)))


class Named(nn.Module):
    """A stage that has blocks, and nothing else, as attributes, as in timm's RegNet."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        for i in range(blocks):
            self.add_module(f"b{i}", Flat())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.children():
            x = block(x)
        return x


class Positions(Stage):
    """A stage with a table of positions that is larger than its blocks, as the first level of timm's NesT."""

    def __init__(self, blocks: nn.Module, rows: int) -> None:
        super().__init__(blocks)
        self.positions = nn.Parameter(torch.randn(rows, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.positions[:3])


class Residual(nn.Module):
    """Half a layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Halves(nn.Module):
    """A layer whose halves are of one class, and no blocks of a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Residual(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
        self.mlp = Residual(Mlp())

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attention(x))


class Lists(nn.Module):
    """Layers as in x-transformers: norms, a block, a residual."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (Mlp, Block) * 2
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.ModuleList([nn.LayerNorm(WIDTH), nn.Identity()]), kind(), nn.Identity()])
            for kind in kinds
        )

    def forward(self, x: Tensor) -> Tensor:
        for norms, block, residual in self.layers:  # type: ignore[misc]
            x = residual(x) + block(norms[0](x))
        return x


class Dicts(nn.Module):
    """Layers as dicts of what they consist of."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "mix": Block()}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["mix"](layer["norm"](x))  # type: ignore[index]
        return x


class Called(nn.ModuleDict):
    """A dict that is a layer itself, as torchvision's dense blocks are."""

    def forward(self, x: Tensor) -> Tensor:
        for inner in self.values():
            x = x + inner(x)
        return x


class ListOfCalled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Called({"a": Block()}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


MODELS: dict[str, tuple[Any, list[str]]] = {
    "stages of sequences": (
        lambda: nn.Sequential(*(Stage(nn.Sequential(Block(), Block())) for _ in range(2))),
        [f"{stage}.{name}" for stage in range(2) for name in ("downsample", "blocks.0", "blocks.1")],
    ),
    "stages of lists": (
        lambda: nn.Sequential(*(Stage(nn.ModuleList([WrittenOut(), WrittenOut()])) for _ in range(2))),
        [f"{stage}.{name}" for stage in range(2) for name in ("downsample", "blocks.0", "blocks.1")],
    ),
    "stages of flat blocks": (
        lambda: nn.Sequential(*(Stage(nn.ModuleList([Flat(), Flat()])) for _ in range(2))),
        [f"{stage}.{name}" for stage in range(2) for name in ("downsample", "blocks.0", "blocks.1")],
    ),
    "stages of dicts": (
        lambda: nn.Sequential(*(Stage(nn.ModuleDict({"a": Flat(), "b": Flat()})) for _ in range(2))),
        [f"{stage}.{name}" for stage in range(2) for name in ("downsample", "blocks.a", "blocks.b")],
    ),
    "stages of attributes": (
        lambda: nn.Sequential(Named(1), Named(2), Named(2)),
        ["0.b0", "1.b0", "1.b1", "2.b0", "2.b1"],
    ),
    "a stage of one block beside others": (
        lambda: nn.Sequential(*(Stage(nn.Sequential(*(Block() for _ in range(n)))) for n in (1, 2))),
        ["0.downsample", "0.blocks", "1.downsample", "1.blocks.0", "1.blocks.1"],
    ),
    "a stage whose blocks are a small part of it": (
        lambda: nn.Sequential(*(Positions(nn.Sequential(Block(), Block()), rows) for rows in (999, 3))),
        [f"{stage}.{name}" for stage in range(2) for name in ("downsample", "blocks.0", "blocks.1")],
    ),
    "projections in a sequence, blocks in the next": (
        lambda: nn.Sequential(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)),
            nn.Sequential(Block(), Block()),
        ),
        ["0", "1.0", "1.1"],
    ),
    "halves of one class": (lambda: nn.Sequential(Halves(), Halves()), ["0", "1"]),
    "blocks in a dict": (lambda: Stage(nn.ModuleDict({"a": Flat(), "b": Flat()})), ["blocks.a", "blocks.b"]),
    "blocks in attributes": (Attributes, ["block0", "block1"]),
    "named experts with a router": (lambda: nn.Sequential(NamedExperts(), NamedExperts()), ["0", "1"]),
    "blocks of units": (lambda: nn.Sequential(Units(), Units()), ["0", "1"]),
    "blocks without children": (lambda: nn.Sequential(WrittenOut(), WrittenOut()), ["0", "1"]),
    "experts": (lambda: nn.Sequential(Experts(), Experts()), ["0", "1"]),
    "experts with a router": (lambda: nn.Sequential(Routed(), Routed()), ["0", "1"]),
    "lists of lists": (Lists, ["layers.0.1", "layers.1.1", "layers.2.1", "layers.3.1"]),
    "dicts that are called in a list": (ListOfCalled, ["layers.0", "layers.1"]),
    "dicts in a list": (Dicts, ["layers.0.mix", "layers.1.mix"]),
    "projections": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)), []),
}


@pytest.mark.parametrize("what", MODELS)
def test_layers(what: str) -> None:
    make, names = MODELS[what]
    plain = make()
    model, x = copy.deepcopy(plain), torch.randn(3, WIDTH)
    report = ckptfused.convert(model)
    assert [layer.name for layer in report.layers] == names
    close(result(model, x), result(plain, x), 1e-5)


def test_a_stage_that_checkpoints_itself_is_looked_into() -> None:
    """Hugging Face's Swin: its stages and their blocks are both its checkpointing layers."""
    config = SwinConfig(image_size=32, patch_size=4, embed_dim=16, depths=[1, 2], num_heads=[2, 2], window_size=4)
    plain = SwinModel(config).train()
    model, x = copy.deepcopy(plain), torch.randn(2, 3, 32, 32)
    report = ckptfused.convert(model)
    names = ["0.blocks.0", "0.downsample", "1.blocks.0", "1.blocks.1"]
    assert [layer.name for layer in report.layers] == [f"encoder.layers.{name}" for name in names]
    torch.manual_seed(0)
    expected = plain(x).last_hidden_state
    torch.manual_seed(0)
    torch.testing.assert_close(model(x).last_hidden_state, expected)

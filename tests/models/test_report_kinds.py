"""The report on layers without an adapter, on layers that are equal, and on those that no call checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
import transformers

import ckptfused
from ckptfused.models.describe import counts
from ckptfused.models.describe.example import example, with_tables
from ckptfused.models.describe.own_forward import storage
from ckptfused.models.family import EXAMPLE_TOKENS as TOKENS
from ckptfused.models.policy import CheckpointPolicy
from ckptfused.models.report import LayerReport, Report
from tests.models import zoo_decoders, zoo_llama, zoo_seq2seq  # noqa: F401
from tests.models.compare import close, flash_alone, gradients, run
from tests.models.small import llama, unfused
from tests.models.zoo import ZOO, randomize, text_batch

SIZES: dict[str, Any] = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4}
SIZES |= {"num_hidden_layers": 4, "num_key_value_heads": 2, "max_position_embeddings": 300}
POLICY = CheckpointPolicy.uniform("all")
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}


def saved(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Bytes a token that a real call saves, x among them."""
    given = [t for t in torch.utils._pytree.tree_leaves((args[1:], kwargs)) if isinstance(t, Tensor)]
    owned = {storage(t) for t in (*layer.parameters(), *layer.buffers(), *given)}
    held: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        if storage(t) not in owned:
            held.setdefault(storage(t), t)
        return t

    args[0].data.normal_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = layer(*args, **kwargs)
    assert result is not None  # held, so that no other storage takes the place of one
    return sum(t.untyped_storage().nbytes() for t in held.values()) / TOKENS


def with_data(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_meta:
        return value
    half = torch.randn((*value.shape[:-1], value.size(-1) // 2), dtype=value.dtype)
    return torch.cat((half, half), -1)  # rotary tables say each number twice


@pytest.mark.parametrize("name", ["Olmo2", "Cohere", "Granite", "Phi", "Electra", "Gemma", "ModernBert", "Exaone4"])
def test_bytes_without_an_adapter_are_those_of_real_calls(name: str) -> None:
    """Before, with attention counted as a flash kernel's; and after, where only x is saved."""
    model = transformers.AutoModel.from_config(getattr(transformers, f"{name}Config")(**SIZES)).train()
    report = ckptfused.convert(model)
    assert report.layers
    for said in report.layers:
        layer = model.get_submodule(said.name)
        assert said.before is not None, said.name
        args, kwargs = example(model, said.name, layer)
        kwargs = torch.utils._pytree.tree_map(with_data, with_tables(kwargs))
        assert saved(layer, args, kwargs) == pytest.approx(said.after, abs=1 / TOKENS)
        with ckptfused.original(model), flash_alone():
            assert saved(layer, args, kwargs) == pytest.approx(said.before, abs=1 / TOKENS), said.name


class Mixer(nn.Module):
    """A layer of nobody's, which saves another number of bytes where its place or a setting says so."""

    def __init__(self, place: int, width: int = 16, depth: int = 1) -> None:
        super().__init__()
        self.layer_idx, self.depth, self.inner = place, depth, nn.Sequential(nn.Linear(width, width), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.depth):
            x = self.inner(x)
        return x


class Placed(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.layer_idx % 2 + 1):
            x = self.inner(x)
        return x


class Asking(Mixer):
    def forward(self, x: Tensor, order: str) -> Tensor:
        return self.inner(x) if order == "once" else x


def counted(model: nn.Module) -> tuple[Report, int]:
    with mock.patch.object(counts, "saved_by_autograd", side_effect=counts.saved_by_autograd) as count:
        report = ckptfused.convert(model)
        assert count.call_count == 0
        assert all(layer.before for layer in report.layers)
        return report, count.call_count


def test_equal_layers_are_counted_once() -> None:
    model = llama(num_hidden_layers=6)
    report, count = counted(model)
    assert count == 1 and len({layer.before for layer in report.layers}) == 1 and report.layers[0].before
    assert counted(model)[1] == 1  # converted before, too
    assert counted(nn.ModuleList(Mixer(place) for place in range(5)))[1] == 1


CHANGES: dict[str, Callable[[Any], Any]] = {
    "mode": lambda layer: layer.inner[1].eval(),
    "frozen": lambda layer: layer.inner[0].weight.requires_grad_(False),
    "setting": lambda layer: setattr(layer, "depth", 3),
    "class": lambda layer: setattr(layer.inner, "1", nn.ReLU()),
    "width": lambda layer: setattr(layer, "inner", nn.Sequential(nn.Linear(24, 24), nn.GELU())),
    "type": lambda layer: layer.double(),
    "more": lambda layer: layer.inner.append(nn.GELU()),
    "shared": lambda layer: layer.inner.append(layer.inner[0]),
    "function": lambda layer: setattr(layer, "act", lambda x: x),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_differs_is_counted_apart(what: str) -> None:
    model = nn.ModuleList(Mixer(place) for place in range(3))
    CHANGES[what](model[1])
    report, count = counted(model)
    assert count == 2
    for place, said in enumerate(report.layers):
        twin = nn.ModuleList([copy.deepcopy(model[place])])
        ckptfused.revert(twin)
        assert ckptfused.convert(twin).layers[0].before == said.before is not None


def test_a_layer_that_reads_its_place_is_counted_for_it() -> None:
    report, count = counted(nn.ModuleList(Placed(place) for place in range(4)))
    first, second, *others = (layer.before for layer in report.layers)
    assert first is not None and second is not None and first < second and others == [first, second]
    assert count == 5  # once without a place, and once in each


def test_a_forward_that_cannot_be_called_is_not_counted() -> None:
    report = ckptfused.convert(nn.ModuleList(Asking(place) for place in range(2)))
    assert {(layer.before, layer.after) for layer in report.layers} == {(None, None)}
    assert "generic  not counted  no adapter for this class" in str(report)


def named(pattern: str) -> Report:
    """Layers whose class is a letter each."""
    return Report(tuple(LayerReport(f"m.layers.{i}", kind, None, "generic") for i, kind in enumerate(pattern)), POLICY)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("aaaa", ["m.layers.0 … m.layers.3"]),
        ("abab", ["m.layers.0,2", "m.layers.1,3"]),
        ("aabaac", ["m.layers.0…1,3…4", "m.layers.2", "m.layers.5"]),
        ("abc", ["m.layers.0", "m.layers.1", "m.layers.2"]),
        ("ab" * 16, ["m.layers.0,2,4,6,8,10,…,30", "m.layers.1,3,5,7,9,11,…,31"]),
    ],
)
def test_layers_that_alternate_share_a_line(pattern: str, names: list[str]) -> None:
    lines = str(named(pattern)).splitlines()[1:-1]
    assert [line.partition("  ")[0] for line in lines] == names


def test_names_under_several_stems() -> None:
    layers = [LayerReport(name, kind, None, "generic") for name, kind in (("e.0", "a"), ("e.1", "b"), ("d.0", "a"))]
    assert str(Report(tuple(layers), POLICY)).splitlines()[1].startswith("e.0,d.0 ")


def test_a_layer_that_a_loop_repeats(underived: None) -> None:
    """ALBERT holds one layer, which runs as often as its configuration says."""
    config = transformers.AlbertConfig(**{**SIZES, "embedding_size": 24}, hidden_dropout_prob=0.0)
    config.attention_probs_dropout_prob = 0.0
    plain = randomize(transformers.AlbertForMaskedLM(config)).train()
    model = copy.deepcopy(plain)
    (said,) = ckptfused.convert(model).layers
    assert said.layer == "AlbertLayer" and said.path == "generic" and said.before and said.after == 48 * 4
    with unfused() as reasons:
        got = run(model, text_batch())
    assert len(reasons) == 4
    close(got, run(plain, text_batch()), 1e-5)


@pytest.mark.parametrize("wrap", [nn.Sequential, nn.ModuleList])
def test_what_stands_alone_in_a_list(wrap: Any) -> None:
    """A loop calls what is in a `ModuleList`; what holds layers, or is ckptfused's own, is no layer."""
    lone = wrap([Mixer(0)]) if wrap is nn.ModuleList else wrap(Mixer(0))
    assert len(ckptfused.convert(lone).layers) == (wrap is nn.ModuleList)
    inner = nn.ModuleList([nn.Sequential(Mixer(0), Mixer(1))])
    assert [layer.name for layer in ckptfused.convert(inner).layers] == ["0.0", "0.1"]
    block = ckptfused.FusedCheckpointBlock(16, 2, 32)
    assert ckptfused.convert(nn.ModuleList([nn.Sequential(block)])).layers == ()


adapting = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@adapting
@pytest.mark.parametrize(("name", "paths"), [("llama", ["original"] * 2), ("t5", ["part"] * 2 + ["original"] * 2)])
def test_prefix_tuning(name: str, paths: list[str]) -> None:
    """Every call of a decoder's layer has a filled cache: it runs as it was, and saves what it did."""
    peft = pytest.importorskip("peft")
    plain = randomize(ZOO[name].make(0.0, "sdpa")).train()
    options = {"task_type": "CAUSAL_LM"}
    if name == "t5":
        heads, width = plain.config.num_heads, plain.config.d_kv  # type: ignore[union-attr]
        options = {"task_type": "SEQ_2_SEQ_LM", "num_attention_heads": heads, "token_dim": heads * width}
        options["num_layers"] = 2
    model = peft.get_peft_model(plain, peft.PrefixTuningConfig(num_virtual_tokens=4, **options)).train()
    want = run(copy.deepcopy(model), ZOO[name].batch())
    report = ckptfused.convert(model)
    assert [layer.path for layer in report.layers] == paths and report.fused == 0
    said = [layer for layer in report.layers if layer.path == "original"]
    assert all(layer.before == layer.after is not None for layer in said)
    assert all(layer.reason.startswith("prefix tuning: each call has a filled key/value cache") for layer in said)
    with unfused() as reasons:
        got = run(model, ZOO[name].batch())
    assert len(reasons) == 2 and all(reason.original for reason in reasons)
    close(got, want, 1e-5)


@adapting
def test_adapters_of_another_kind_are_no_prefix() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"])
    assert ckptfused.convert(peft.get_peft_model(llama(), config)).fused == 2


def test_own_blocks_that_run_generically_are_noted() -> None:
    model = nn.Sequential(*(ckptfused.FusedCheckpointBlock(16, 2, 32) for _ in range(3)))
    assert ckptfused.convert(model).notes == ()
    for block in (model[0], model[2]):
        block.linear1.register_forward_hook(lambda *_: None)
    report = ckptfused.convert(model)
    said = "0, 2: FusedCheckpointBlock runs generically (linear1 has a hook or a forward of its own)"
    assert report.notes == (said,) and said in str(report)
    assert not gradients(model)

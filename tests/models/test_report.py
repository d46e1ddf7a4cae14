"""What `convert` says, that its numbers are those of real calls, and that it can be undone and repeated."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import ckptfused
from ckptfused.models.describe.example import example, with_values
from ckptfused.models.describe.own_forward import storage
from ckptfused.models.families.torch_nn import TorchEncoder
from ckptfused.models.family import EXAMPLE_TOKENS as TOKENS
from ckptfused.models.family import FAMILIES, register
from ckptfused.models.forward import ConvertedForward
from ckptfused.models.policy import CheckpointPolicy
from ckptfused.models.report import LayerReport, Report
from tests.cases import by_turns
from tests.models import zoo_decoders, zoo_encoders, zoo_llama, zoo_moe, zoo_seq2seq, zoo_torch  # noqa: F401
from tests.models.compare import close, flash_alone, result, run
from tests.models.versions import since
from tests.models.zoo import ZOO, Specimen, randomize

WIDTH = 48
SPECIMENS = ("llama", "qwen3", "gpt2", "neox", "bert", "vit", "mixtral", "t5", "whisper", "torch-encoder-pre")
SPECIMENS += ("torch-decoder-post", "opt-post", "phi3", "roberta", "t5-gated", "qwen3-moe-dense")

whisper_is_fused = since((5, 4), "Whisper's layers are fused")


def build(name: str, p: float = 0.0, implementation: str = "sdpa") -> tuple[Any, Specimen]:
    specimen = ZOO[name]
    return randomize(specimen.make(p, implementation)).train(), specimen


def saved(model: nn.Module, layer: nn.Module, said: LayerReport) -> int:
    """Bytes that a real call of a layer saves, x among them."""
    x = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    if said.family == "derived":
        (_, *others), kwargs = with_values(*example(model, said.name, layer))
        args: tuple[Any, ...] = (x, *others)
    else:
        args, kwargs = FAMILIES[str(said.family)].example(layer, x)
    given = [t for t in torch.utils._pytree.tree_leaves((args[1:], kwargs)) if isinstance(t, Tensor)]
    for tensor in given:  # examples are for shapes: their contents are arbitrary
        if tensor.is_floating_point():
            half = tensor.size(-1) // 2  # rotary tables say each number twice
            tensor.data.normal_()[..., -half:] = tensor.data[..., :half]
    owned = {storage(t) for t in (*layer.parameters(), *layer.buffers(), *given)}
    held: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        if storage(t) not in owned:
            held.setdefault(storage(t), t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = layer(*args, **kwargs)
    assert result is not None  # held, so that no storage takes the place of another
    return sum(t.untyped_storage().nbytes() for t in held.values())


@pytest.mark.parametrize(("name", "keep", "p"), by_turns(SPECIMENS, ["inputs", "attention+mid", "all"], [0.0, 0.25]))
def test_bytes_after_are_those_of_a_real_call(name: str, keep: str, p: float) -> None:
    """To the byte, for fused layers and for those that are fused in part."""
    model, specimen = build(name, p)
    report = ckptfused.convert(model, keep)
    for layer, said in zip(specimen.layers(model), report.layers, strict=True):
        assert said.family is not None and said.after is not None
        assert saved(model, layer, said) == round(said.after * TOKENS), said.name


def counted(name: str) -> Any:
    mixture = name in ("mixtral", "qwen3-moe-dense")
    return pytest.param(name, marks=since((5, 2), "experts run without numbers, to be counted") if mixture else ())


@pytest.mark.parametrize("name", [counted(name) for name in SPECIMENS if name != "t5-gated"])
def test_bytes_before_are_those_of_a_real_call(name: str) -> None:
    """Eager attention: what SDPA's kernels save depends on the device, and is counted as a flash kernel's."""
    model, specimen = build(name, implementation="eager")
    report = ckptfused.convert(model)
    ckptfused.revert(model)
    for layer, said in zip(specimen.layers(model), report.layers, strict=True):
        assert said.family is not None and said.before is not None
        with flash_alone():
            assert saved(model, layer, said) == round(said.before * TOKENS), said.name


@whisper_is_fused
def test_data() -> None:
    model, _ = build("whisper")
    report = ckptfused.convert(model)
    assert isinstance(report, Report) and report.policy == CheckpointPolicy() and report.fused == 2
    first, last = report.layers[0], report.layers[-1]
    assert (first.name, first.layer, first.family) == (
        "model.encoder.layers.0",
        "WhisperEncoderLayer",
        "whisper_encoder",
    )
    assert (first.path, first.reason, first.after) == ("fused", "", 48 * 4)
    assert (last.name, last.path, last.reason) == ("model.decoder.layers.1", "part", "cross attention")
    assert last.after == 48 * 4
    assert all(x.before is not None and x.before > 10 * x.after for x in (first,))  # type: ignore[operator]


@whisper_is_fused
def test_table() -> None:
    """Equal neighbours share a line; a layer that differs has one of its own."""
    model, _ = build("whisper")
    model.model.encoder.layers[1].fc1.register_forward_hook(lambda *_: None)
    lines = str(ckptfused.convert(model)).splitlines()
    assert lines[0].split() == ["layers", "class", "family", "path", "bytes/token", "why"]
    assert len({line.index("W") for line in lines[1:4]}) == 1  # the classes stand below each other
    assert lines[1].startswith("model.encoder.layers.0 ") and " fused " in lines[1] and lines[1].endswith("→ 192")
    assert "up: Linear has a hook" in lines[2] and " generic " in lines[2]
    assert lines[3].startswith("model.decoder.layers.0 … model.decoder.layers.1") and " part " in lines[3]
    assert lines[4] == f"4 layers: 1 fused, 1 generic, 2 part; policy {CheckpointPolicy().digest}: keep='inputs'"


def test_table_of_unknown_layers() -> None:
    report = Report((LayerReport("a", "Block", None, "generic", "no adapter for this class"),), CheckpointPolicy())
    assert " ".join(str(report).splitlines()[1].split()) == "a Block – generic not counted no adapter for this class"


@pytest.mark.parametrize(("vocabulary", "notes"), [(97, 1), (4, 0)])
def test_note_on_the_head(vocabulary: int, notes: int) -> None:
    """Said where the logits outweigh what all layers save."""
    options = {**zoo_llama.SIZES, "vocab_size": vocabulary, "bos_token_id": 1, "eos_token_id": 2}
    import transformers

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options))
    report = ckptfused.convert(model)
    assert len(report.notes) == notes
    for note in report.notes:
        assert "The loss head sets the peak: 97 logits" in note and note in str(report)


def test_no_note_where_a_layer_is_not_counted() -> None:
    model, _ = build("llama")
    model.model.layers[0].forward = lambda *args, **kwargs: None
    report = ckptfused.convert(model)
    assert report.layers[0].after is None and report.notes == ()
    assert "patched or offloaded" in report.layers[0].reason


def state(layer: nn.Module) -> dict[str, Any]:
    """What `convert` must leave as it was: the layer's attributes, the forward aside, and its class."""
    found = {key: value for key, value in vars(layer).items() if key not in ("forward", "_replicate_for_data_parallel")}
    return {**found, "class": type(layer), "modules": dict(layer.named_modules()), "training": layer.training}


@pytest.mark.parametrize("name", ["llama", "bert", "mixtral", "t5", "whisper", "torch-encoder-post"])
def test_revert_undoes(name: str) -> None:
    model, specimen = build(name)
    layers = specimen.layers(model)
    before = [dict(vars(layer)) for layer in layers]
    states, keys = [state(layer) for layer in layers], list(model.state_dict())
    parameters = {key: id(p) for key, p in model.named_parameters()}
    loss = run(model, specimen.batch())["loss"]
    ckptfused.convert(model)
    assert [state(layer) for layer in layers] == states
    assert all(isinstance(layer.forward, ConvertedForward) for layer in layers)
    assert list(model.state_dict()) == keys
    assert {key: id(p) for key, p in model.named_parameters()} == parameters
    run(model, specimen.batch())
    assert ckptfused.revert(model) == len(layers)
    assert [dict(vars(layer)) for layer in layers] == before
    assert torch.equal(run(model, specimen.batch())["loss"], loss)
    assert ckptfused.revert(model) == 0


def test_a_forward_that_was_there_comes_back() -> None:
    model, specimen = build("bert")
    layer = specimen.layers(model)[0]
    own = layer.forward
    calls = itertools.count()

    def patched(*args: Any, **kwargs: Any) -> Any:
        next(calls)
        return own(*args, **kwargs)

    layer.forward = patched  # type: ignore[method-assign]
    for _ in range(2):
        report = ckptfused.convert(model)
    assert [x.path for x in report.layers] == ["generic", "fused"]
    run(model, specimen.batch())
    assert next(calls) == 2  # forward, and replay
    ckptfused.revert(model)
    assert layer.forward is patched


@pytest.mark.parametrize("name", ["llama", "mixtral", "whisper", "torch-decoder-pre"])
def test_convert_twice_changes_what_is_kept(name: str) -> None:
    model, specimen = build(name)
    first = ckptfused.convert(model)
    second = ckptfused.convert(model, "all")
    assert [x.path for x in first.layers] == [x.path for x in second.layers]
    assert [x.before for x in first.layers] == [x.before for x in second.layers]
    assert all(a.after < b.after for a, b in zip(first.layers, second.layers, strict=True))  # type: ignore[operator]
    layers = specimen.layers(model)
    assert all(layer.forward.mode.keep == "all" and layer.forward.before is None for layer in layers)  # type: ignore
    assert ckptfused.revert(model) == len(layers)
    assert all("forward" not in vars(layer) for layer in layers)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("name", ["bert", "mixtral", "t5", "torch-encoder-post"])
def test_copies(name: str, how: str) -> None:
    """A copy is converted, and runs on its own weights."""
    model, specimen = build(name)
    ckptfused.convert(model)
    copied: Any = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    want = run(model, specimen.batch())
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    got = run(copied, specimen.batch())
    assert all(torch.equal(got[key], want[key]) for key in want)
    for old, new in zip(specimen.layers(model), specimen.layers(copied), strict=True):
        assert type(new) is type(old) and isinstance(new, type(old))
        assert new.forward.layer is new  # type: ignore[union-attr]
    assert ckptfused.revert(copied) == len(specimen.layers(copied))


def test_unknown_policies() -> None:
    model, _ = build("mixtral")
    with pytest.raises(ValueError, match="keep: expected a preset"):
        ckptfused.convert(model, "most")
    with pytest.raises(ValueError, match="keep: expected names among"):
        ckptfused.convert(model, ("attn", "nothing"))
    with pytest.raises(TypeError, match="expected an nn.Module, got int"):
        ckptfused.convert(3)  # type: ignore[arg-type]
    assert ckptfused.revert(model) == 0


def test_a_family_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="'torch_encoder': choose another name"):
        register(TorchEncoder())


class _Caching(nn.TransformerEncoderLayer):
    """Keeps what it computes: in an attribute, a list, a buffer and a module made in forward."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 4, 64, 0.0, batch_first=True)
        self.calls, self.table = [], None
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.calls.append(len(src))
        self.table = torch.ones(src.size(1), device=src.device)
        self.seen = self.seen + 1
        self.late = nn.Linear(1, 1)
        return super().forward(src * self.table[:, None], *args, **kwargs)


def test_counting_bytes_leaves_no_trace_in_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchEncoder, "layers", (*TorchEncoder.layers, f"{__name__}._Caching"))
    monkeypatch.setattr(TorchEncoder, "as_read", lambda *_: True)
    layer = _Caching()
    parameters = dict(layer.named_parameters())
    (report,) = ckptfused.convert(nn.ModuleList([layer, _Caching()])).layers[:1]
    assert report.family == TorchEncoder.name and report.before
    assert layer.calls == [] and layer.table is None and layer.seen.equal(torch.zeros(1)) and not hasattr(layer, "late")
    assert all(t is parameters[name] for name, t in layer.named_parameters())


@pytest.mark.parametrize("shared", ["norm", "linear", "encoder"])
def test_modules_under_two_names_stay_as_they_are(shared: str) -> None:
    """functional_call, for one, would leave the tensors of its call in them."""
    if shared == "encoder":
        model: Any = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.0, batch_first=True), 2)
        for layer in model.layers:
            layer.norm2 = layer.norm1
        x = torch.randn(2, 5, WIDTH)
        step: Callable[[Any], dict[str, Tensor]] = lambda model: result(model, x)  # noqa: E731
    else:
        model, specimen = build("llama")
        for layer in model.model.layers:
            if shared == "norm":
                layer.post_attention_layernorm = layer.input_layernorm
            else:
                layer.mlp.up_proj = layer.mlp.gate_proj
        batch = specimen.batch()
        step = lambda model: run(model, batch)  # noqa: E731
    plain, parameters = copy.deepcopy(model), dict(model.named_parameters())
    assert all(layer.before for layer in ckptfused.convert(model).layers)
    assert all(t is parameters[name] for name, t in model.named_parameters())
    close(step(model), step(plain), 1e-5)

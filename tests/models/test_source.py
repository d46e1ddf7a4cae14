"""Whether a forward is the one that was read: what changes a fingerprint, and what happens where it differs."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers")

import ckptfused
from ckptfused.layer.source import class_name, fingerprint, known_code
from tests.models.test_families import build, close, run
from tests.models.zoo import ZOO, text_batch

PLAIN = """
class Layer:
    def forward(self, x, scale=1.0):
        y = self.inner(x)
        if self.on:
            y = y * scale
        return x + y
"""
SAME = {
    "comments": PLAIN.replace("y * scale", "y * scale  # louder").replace(
        "        return", "        # done\n        return"
    ),
    "docstring": PLAIN.replace("        y = self", '        """Adds.\n\n        And more."""\n        y = self'),
    "annotations": PLAIN.replace("x, scale=1.0):", "x: 'Tensor', scale: float = 1.0) -> 'Tensor':"),
    "layout": PLAIN.replace("        y = self.inner(x)", "        y = self.inner(\n            x\n        )\n"),
    "lines": PLAIN.replace("(self, x, scale=1.0)", "(\n        self,\n        x,\n        scale=1.0,\n    )"),
    "decorated": PLAIN.replace("    def", "    @keep\n    def"),
}
OTHER = {
    "statement": PLAIN.replace("x + y", "y + x"),
    "number": PLAIN.replace("y * scale", "2 * y * scale"),
    "name": PLAIN.replace("self.on", "self.off"),
    "argument": PLAIN.replace("scale", "factor"),
    "order": PLAIN.replace("x, scale=1.0", "scale, x"),
    "text": PLAIN.replace("self.on", "self.kind == 'on'"),
    "missing": PLAIN.replace("        if self.on:\n            y = y * scale\n", ""),
}


NUMBERS = itertools.count()  # a module is imported once in a process, whatever its file says by then


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """The `forward` of a class whose source is given."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(source: str) -> Any:
        name = f"read_from_here_{next(NUMBERS)}"
        (tmp_path / f"{name}.py").write_text("def keep(f):\n    return f\n" + source)
        importlib.invalidate_caches()
        module: ModuleType = importlib.import_module(name)
        return module.Layer.forward

    return make


@pytest.mark.parametrize("how", SAME)
def test_words_around_the_statements_do_not_matter(how: str, load: Callable[[str], Any]) -> None:
    assert SAME[how] != PLAIN
    assert fingerprint(load(SAME[how])) == fingerprint(load(PLAIN)) != ""


@pytest.mark.parametrize("how", OTHER)
def test_statements_do(how: str, load: Callable[[str], Any]) -> None:
    assert OTHER[how] != PLAIN
    assert fingerprint(load(OTHER[how])) not in (fingerprint(load(PLAIN)), "")


def test_where_a_block_ends_matters(load: Callable[[str], Any]) -> None:
    inside = PLAIN.replace("y = y * scale", "y = y * scale\n            y = -y")
    behind = PLAIN.replace("y = y * scale", "y = y * scale\n        y = -y")
    assert fingerprint(load(inside)) != fingerprint(load(behind))


def test_no_source_no_fingerprint() -> None:
    assert fingerprint(eval("lambda self, x: x")) == ""
    assert fingerprint(len) == ""
    assert (
        "" not in {mark for marks in known_code()["classes"].values() for mark in marks} | known_code()["norms"].keys()
    )


def test_every_entry_names_a_class() -> None:
    """A name that is misspelt would never be found, and its layers never fused."""
    for name, read in known_code()["classes"].items():
        module, _, cls = name.rpartition(".")
        library = module.partition(".")[0]
        if library not in ("torch", "transformers"):
            continue
        found = getattr(importlib.import_module(module), cls, None)
        if found is not None:
            assert class_name(found) == name
        else:  # it has gone, or is to come
            assert f"{library} {importlib.metadata.version(library)}" not in read.values(), name


def llama() -> nn.Module:
    return build(ZOO["llama"], 0.0, "sdpa")


def check(model: nn.Module, paths: list[str], why: str) -> None:
    """Converts, compares gradients, reverts."""
    other = copy.deepcopy(model)
    report = ckptfused.convert(other)
    assert [x.path for x in report.layers] == paths, str(report)
    assert all(why in x.reason for x in report.layers if x.path == "generic"), str(report)
    close(run(other, text_batch()), run(model, text_batch()), 1e-5)
    assert ckptfused.revert(other) == 2
    close(run(other, text_batch()), run(model, text_batch()), 0.0)


def test_subclass_with_another_forward(underived: None) -> None:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm

    class Louder(LlamaDecoderLayer):
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
            return 2 * super().forward(hidden_states, **kwargs)

    class Reluctant(LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(F.relu(self.gate_proj(x)) * self.up_proj(x))

    class Shifted(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states) + 0.5

    class Same(LlamaDecoderLayer):
        pass

    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 3 * super().forward(input)

    changes: list[tuple[str, type, str]] = [
        ("", Louder, "Louder"),
        ("mlp", Reluctant, "Reluctant"),
        ("input_layernorm", Shifted, "Shifted"),
        ("self_attn.v_proj", Scaled, "Scaled"),
    ]
    for path, cls, why in changes:
        model: Any = llama()
        model.model.layers[1].get_submodule(path).__class__ = cls
        check(model, ["fused", "generic"], why)
    model = llama()
    model.model.layers[1].__class__ = Same
    check(model, ["fused", "fused"], "")


class Doubled:
    """A `forward` that somebody put on a module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = type(self.module).forward(self.module, *args, **kwargs)
        return (2 * result[0], *result[1:]) if isinstance(result, tuple) else 2 * result


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("", "patched"),
        ("mlp", "LlamaMLP"),
        ("self_attn", "LlamaAttention"),
        ("post_attention_layernorm", "LlamaRMSNorm"),
        ("mlp.down_proj", "Linear"),
        ("mlp.act_fn", "SiLUActivation has a hook or a forward of its own"),
    ],
)
def test_module_with_a_forward_of_its_own(path: str, why: str) -> None:
    model: Any = llama()
    module = model.model.layers[0].get_submodule(path)
    module.forward = Doubled(module)
    check(model, ["generic", "fused"], why)


def test_forward_patched_after_convert() -> None:
    """Everything is looked up at the call."""
    model: Any = llama()
    other: Any = copy.deepcopy(model)
    ckptfused.convert(other)
    for m in (model, other):
        m.model.layers[1].mlp.forward = Doubled(m.model.layers[1].mlp)
    close(run(other, text_batch()), run(model, text_batch()), 1e-5)


def swiglu_of_another_library(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(F.silu(self.gate_proj(x)).mul(self.up_proj(x)))


def test_class_patched(monkeypatch: pytest.MonkeyPatch, underived: None) -> None:
    """Liger does this to LlamaMLP: the class stays, its forward is another's. What is taken back is fused again."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    model = llama()
    check(model, ["fused", "fused"], "")
    with monkeypatch.context() as patch:
        patch.setattr(LlamaMLP, "forward", swiglu_of_another_library)
        check(model, ["generic", "generic"], "LlamaMLP")
    check(model, ["fused", "fused"], "")


def test_norm_class_patched(monkeypatch: pytest.MonkeyPatch, underived: None) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def centred(self: Any, hidden_states: Tensor) -> Tensor:
        return self.weight * F.layer_norm(hidden_states, hidden_states.shape[-1:])

    monkeypatch.setattr(LlamaRMSNorm, "forward", centred)
    check(llama(), ["generic", "generic"], "LlamaRMSNorm")


def test_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger's own patch of LlamaMLP, which needs Triton to be imported and a GPU to run."""
    pytest.importorskip("triton")
    swiglu = pytest.importorskip("liger_kernel.transformers.swiglu")
    from transformers.models.llama.modeling_llama import LlamaMLP

    monkeypatch.setattr(LlamaMLP, "forward", swiglu.LigerSwiGLUMLP.forward)
    model = llama()
    report = ckptfused.convert(model)
    assert [x.path for x in report.layers] == ["generic"] * 2
    assert all("LlamaMLP" in x.reason for x in report.layers)
    if torch.cuda.is_available():
        batch = {k: v.cuda() for k, v in text_batch().items()}
        got = run(model.cuda(), batch)
        ckptfused.revert(model)
        close(got, run(model, batch), 1e-5)


def half_turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    return q * cos.unsqueeze(unsqueeze_dim), k * cos.unsqueeze(unsqueeze_dim)


class AsObject:
    def __call__(self, *args: Any) -> tuple[Tensor, Tensor]:
        return half_turned(*args)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("apply_rotary_pos_emb", half_turned),
        ("apply_rotary_pos_emb", AsObject()),
        ("rotate_half", lambda x: x.roll(1, -1)),
    ],
)
def test_function_patched(
    name: str, value: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Liger puts a rotary embedding of its own into the module: what LlamaAttention calls by name."""
    from transformers.models.llama import modeling_llama

    model = llama()
    before = copy.deepcopy(model)
    ckptfused.convert(before)
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, name, value)
        check(model, ["part", "part"], "")  # derived: the FFN half, which does not call it
        close(run(before, text_batch()), run(model, text_batch()), 1e-5)
    check(model, ["fused", "fused"], "")
    request.getfixturevalue("underived")
    monkeypatch.setattr(modeling_llama, name, value)
    check(model, ["generic", "generic"], f"{name} in LlamaAttention")


def test_functions_of_layers_of_your_own(load: Callable[[str], Any]) -> None:
    """Vouched for with the class; replaced later, they are no longer what was read."""
    from ckptfused.layer.source import unread, vouch

    forward = load(PLAIN.replace("y * scale", "louder(y, scale)") + "\ndef louder(y, scale):\n    return y * scale\n")
    layer = type("Layer", (), {"forward": forward, "__module__": forward.__module__})
    assert unread(layer, forward) == "Layer"
    vouch([layer], {})
    assert unread(layer, forward) == ""
    forward.__globals__["louder"] = half_turned
    assert unread(layer, forward) == "louder in Layer"

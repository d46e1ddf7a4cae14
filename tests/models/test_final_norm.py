"""The norm before a chunked loss, which saves its input alone."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import ckptfused
from ckptfused.models.heads.final_norm import NormForward
from tests.models import zoo_decoders, zoo_encoders, zoo_llama  # noqa: F401
from tests.models.compare import close, run
from tests.models.small import llama
from tests.models.zoo import ZOO, text_batch

NORMS = {"llama": "model.norm", "gpt2": "transformer.ln_f", "neox": "gpt_neox.final_layer_norm",
         "opt": "model.decoder.final_layer_norm", "gemma2": "model.norm"}  # fmt: skip


def made(name: str) -> tuple[Any, Any]:
    """A model and its final norm, converted."""
    model = ZOO[name].make(0.0, ZOO[name].implementations[0]).train()
    ckptfused.convert(model, loss="chunked")
    return model, model.get_submodule(NORMS[name])


def saved_of(model: Any, norm: Any) -> list[Tensor]:
    """What the norm saves in a step."""
    saved: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    before = norm.register_forward_pre_hook(lambda *_: hooks.__enter__())
    after = norm.register_forward_hook(lambda *_: hooks.__exit__(None, None, None))
    model(**text_batch())
    before.remove(), after.remove()
    return saved


@pytest.mark.parametrize("name", NORMS)
def test_it_saves_its_input_alone(name: str) -> None:
    model, norm = made(name)
    assert isinstance(norm.forward, NormForward)
    parameters = {p.data_ptr() for p in norm.parameters()}
    (x,) = {(t.data_ptr(), t.shape) for t in saved_of(model, norm) if t.data_ptr() not in parameters}
    assert x[1] == (*text_batch()["input_ids"].shape, model.config.hidden_size)
    ckptfused.revert(model)
    assert "forward" not in vars(norm)


def test_only_training_runs_it() -> None:
    model, norm = made("llama")
    calls: list[Any] = []
    norm.forward._norm = lambda x, found=norm.forward._norm: calls.append(found(x)) or calls[-1]
    model(**text_batch())
    with torch.no_grad():
        model(**text_batch())
    model.eval()(**text_batch())
    assert [found is not None for found in calls] == [True, False, False]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_types_are_those_of_its_own_forward(dtype: torch.dtype) -> None:
    """Norms of PyTorch and of Hugging Face each have their rule for mixed types, and under autocast."""
    for kind in (torch.nn.LayerNorm, torch.nn.RMSNorm):
        norm = kind(8)
        x = torch.randn(2, 8, dtype=dtype, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            want = norm(x)
            norm.forward = NormForward(norm)
            got = norm(x)
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want)


def test_a_gpus_autocast_has_norms_in_float32() -> None:
    """A CPU leaves them in half precision, so that which forward runs is all that shows here."""
    norm = torch.nn.RMSNorm(8, dtype=torch.bfloat16)
    forward, x = NormForward(norm), torch.randn(2, 8, dtype=torch.bfloat16)
    assert forward._norm(x) is not None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert forward._norm(x) is None and forward._norm(x.float()) is None
        assert NormForward(torch.nn.RMSNorm(8))._norm(x.float()) is not None


def test_a_model_that_is_loaded_or_copied_or_converted_again() -> None:
    torch.manual_seed(0)
    model = llama()
    want = run(model, text_batch())
    ckptfused.convert(model, loss="chunked")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.model.norm.forward.module is other.model.norm
        close(run(other, text_batch()), want, 1e-5)
    ckptfused.convert(model, loss="chunked")
    close(run(model, text_batch()), want, 1e-5)
    ckptfused.convert(model)
    assert "forward" not in vars(model.model.norm)


def test_a_forward_of_its_own_stays() -> None:
    model = llama()
    norm = model.model.norm
    own = norm.forward = lambda x: 2 * type(norm).forward(norm, x)
    want = run(model, text_batch())
    ckptfused.convert(model, loss="chunked")
    assert norm.forward is own
    close(run(model, text_batch()), want, 1e-5)


def test_frozen_and_patched_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, norm = made("llama")
    norm.weight.requires_grad_(False)
    assert "model.norm.weight" not in run(model, text_batch())
    monkeypatch.setattr(type(norm), "forward", lambda self, x: 3 * x)
    assert norm.forward._norm(torch.ones(1, model.config.hidden_size)) is None


def test_calls_by_name_and_tensors_of_other_kinds() -> None:
    """What the module's own forward takes, its place takes."""
    norm = torch.nn.RMSNorm(8)
    norm.weight = torch.nn.Parameter(torch.arange(16.0)[::2])
    nested = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=torch.jagged)
    x = torch.randn(2, 8, requires_grad=True)
    want = norm(x=x)
    wanted = torch.autograd.grad(want.square().sum(), [x, norm.weight])
    plain = norm(nested)
    norm.forward = NormForward(norm)
    torch.testing.assert_close(norm(x=x), want)
    torch.testing.assert_close(torch.autograd.grad(norm(x).square().sum(), [x, norm.weight]), wanted)
    torch.testing.assert_close(norm(nested).values(), plain.values())
    assert list(inspect.signature(norm.forward).parameters) == ["x"]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_wrappers_around_it() -> None:
    """PEFT's copy that is trained saves its input alone; `revert` finds the forward below PEFT's and accelerate's."""
    peft, hooks = pytest.importorskip("peft"), pytest.importorskip("accelerate.hooks")
    config = peft.LoraConfig(r=2, target_modules="all-linear", modules_to_save=["norm"])
    model = peft.get_peft_model(llama(), config)
    want = run(model, text_batch())
    ckptfused.convert(model, loss="chunked")
    norm = model.base_model.model.model.norm
    trained = norm.modules_to_save["default"]
    assert isinstance(trained.forward, NormForward)
    close(run(model, text_batch()), want, 1e-5)
    ckptfused.revert(model)
    assert not any(isinstance(vars(m).get("forward"), NormForward) for m in model.modules())
    model = llama()
    ckptfused.convert(model, loss="chunked")
    hooks.add_hook_to_module(model.model.norm, hooks.ModelHook())
    wrapped = peft.get_peft_model(model, config)
    ckptfused.revert(wrapped)
    for module in wrapped.modules():
        held = [vars(module).get(name) for name in ("forward", "_old_forward")]
        assert not any(isinstance(one, NormForward) for one in held)

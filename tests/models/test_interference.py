"""Hooks on all modules, weights and inputs that PyTorch treats unlike others: what is computed stays what it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
)
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("transformers")

import ckptfused
from tests.models import zoo_llama, zoo_moe, zoo_seq2seq  # noqa: F401
from tests.models.compare import close, gradients, run
from tests.models.small import twins, unfused
from tests.models.zoo import ZOO, randomize, text_batch


def forward_hook() -> Any:
    return register_module_forward_hook(lambda m, _, y: y * 1.25 if isinstance(m, nn.Linear) else None)


def pre_hook() -> Any:
    return register_module_forward_pre_hook(lambda m, args: (args[0] * 1.25,) if isinstance(m, nn.Linear) else None)


def backward_hook() -> Any:
    def halve(module: nn.Module, grads: Any, _: Any) -> Any:
        return tuple(None if g is None else g / 2 for g in grads) if isinstance(module, nn.Linear) else None

    return register_module_full_backward_hook(halve)


@pytest.mark.filterwarnings("ignore:.*ackward hook:UserWarning")
@pytest.mark.parametrize("register", [forward_hook, pre_hook, backward_hook])
def test_hooks_on_all_modules(register: Any) -> None:
    plain, model = twins()
    handle = register()
    try:
        with unfused() as reasons:
            got = run(model, text_batch())
        want = run(plain, text_batch())
    finally:
        handle.remove()
    assert len(reasons) == len(model.model.layers)
    close(got, want, 1e-5)


def test_a_patched_class(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = twins()
    own = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: own(self, x) * 1.25)
    with unfused() as reasons:
        got = run(model, text_batch())
    assert len(reasons) == len(model.model.layers) and "of the class Linear was patched" in str(reasons)
    close(got, run(plain, text_batch()), 1e-5)


def test_what_only_watches_which_module_runs_changes_nothing() -> None:
    _, model = twins()
    with FlopCounterMode(display=False), unfused() as reasons:
        run(model, text_batch())
    assert not reasons


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("name", ["llama", "mixtral", "t5", "whisper"])
def test_functional_call(name: str, hooked: bool) -> None:
    """A checkpoint would replay with the module's own weights, which are back in their place by then."""
    plain = randomize(ZOO[name].make(0.0, "sdpa")).train()
    if hooked:
        for layer in ZOO[name].layers(plain):
            next(m for m in layer.modules() if isinstance(m, nn.Linear)).register_forward_hook(lambda _, args, y: y * 2)
    model = copy.deepcopy(plain)
    ckptfused.convert(model)

    def step(model: nn.Module) -> dict[str, Tensor]:
        weights = {key: p.detach().clone().requires_grad_() for key, p in model.named_parameters()}
        lent = {key: p * 1.5 for key, p in weights.items()}
        loss = torch.func.functional_call(model, lent, (), ZOO[name].batch()).loss
        found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        gradients = {key: g for key, g in zip(weights, found, strict=True) if g is not None}
        return {"loss": loss.detach(), **gradients}

    close(step(model), step(plain), 1e-5)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_features_made_in_inference_mode(name: str, hooked: bool) -> None:
    plain: Any = randomize(ZOO[name].make(0.0, "sdpa")).train()
    for layer in plain.model.layers:
        if hooked:
            layer.self_attn.o_proj.register_forward_hook(lambda _, args, y: y * 2)
    model = copy.deepcopy(plain)
    ckptfused.convert(model)

    def step(model: Any) -> dict[str, Tensor]:
        batch: dict[str, Any] = text_batch()
        with torch.inference_mode():
            batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids"))
        loss = model(**batch).loss
        loss.backward()
        return {"loss": loss.detach(), **gradients(model)}

    with unfused() as reasons:
        got = step(model)
    assert len(reasons) == len(model.model.layers) * hooked
    close(got, step(plain), 1e-5)


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_pytorchs_quantised_layers() -> None:
    plain, _ = twins()
    quantised = torch.ao.quantization.quantize_dynamic(plain.eval(), {nn.Linear})
    model = copy.deepcopy(quantised)
    report = ckptfused.convert(model)
    assert {layer.path for layer in report.layers} == {"generic"}
    assert all("quantized" in layer.reason for layer in report.layers)
    with torch.no_grad():
        ids = text_batch()["input_ids"]
        assert torch.equal(model(ids).logits, quantised(ids).logits)


def test_weights_of_a_tensor_subclass() -> None:
    """torchao's quantised weights are such."""
    two = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor
    plain, model = twins()
    for one in (plain, model):
        up = one.model.layers[0].mlp.up_proj
        up.weight = nn.Parameter(two(up.weight.detach().clone(), up.weight.detach().clone()), requires_grad=False)
    report = ckptfused.convert(model)
    assert [layer.path for layer in report.layers] == ["generic", "fused"]
    assert "TwoTensor" in report.layers[0].reason
    with torch.no_grad():
        got, want = (one(**text_batch(), use_cache=False).loss.a for one in (model, plain))
    close({"loss": got}, {"loss": want}, 1e-5)


def test_data_parallel_is_refused() -> None:
    """What `nn.DataParallel` does with a model on several GPUs, in one clear error."""
    model = ZOO["llama"].make(0.0, "sdpa")
    ckptfused.convert(model)
    layer = ZOO["llama"].layers(model)[0]
    with pytest.raises(ValueError, match="model: nn.DataParallel cannot replicate.*DistributedDataParallel"):
        ckptfused.convert(torch.nn.DataParallel(model))
    with pytest.raises(RuntimeError, match="nn.DataParallel cannot replicate.*DistributedDataParallel"):
        layer._replicate_for_data_parallel()  # type: ignore[operator]
    ckptfused.revert(model)
    assert type(layer._replicate_for_data_parallel()) is type(layer)  # type: ignore[operator]


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of checks of shapes
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # transformers' of its own
def test_traced_by_torch_jit() -> None:
    """The older exporter to ONNX traces so."""

    class Logits(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model.eval()

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]

    plain, model = twins()
    ids, others = text_batch()["input_ids"], text_batch()["input_ids"].flip(1)
    traced = torch.jit.trace(Logits(model), ids)
    torch.testing.assert_close(traced(others), Logits(plain)(others))

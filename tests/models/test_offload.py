"""Weights that `accelerate` keeps elsewhere until a module runs: the layers' own modules run, with its hooks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import accelerate

import ckptfused
from tests.models.compare import close, gradients
from tests.models.small import llama, unfused
from tests.models.zoo import text_batch

pytestmark = pytest.mark.each_torch

CPU = torch.device("cpu")
PLACES = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1", "model.norm", "lm_head")
INSIDE, LAYER = "has a hook or a forward of its own", "its forward is not its class's (patched or offloaded)"


def cpu_offload(model: Any, folder: Path) -> None:
    accelerate.cpu_offload(model, execution_device=CPU)


def disk_offload(model: Any, folder: Path) -> None:
    accelerate.disk_offload(model, folder, execution_device=CPU)


def dispatch(model: Any, folder: Path) -> None:
    """A `device_map`: the first layer on the disk, the rest where it runs."""
    places = dict.fromkeys(PLACES, "cpu") | {"model.layers.0": "disk"}
    accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=folder, force_hooks=True)


def whole_layers(model: Any, folder: Path) -> None:
    """The weights of a layer come and go together: no hooks inside."""
    accelerate.cpu_offload(model, execution_device=CPU, preload_module_classes=["LlamaDecoderLayer"])


def step(model: Any) -> dict[str, Tensor]:
    """Loss, the gradients that offloading leaves, and that of the embedded text, which passes all layers."""
    model.zero_grad()
    batch: dict[str, Any] = text_batch()
    batch["inputs_embeds"] = torch.randn(*batch.pop("input_ids").shape, 48, generator=torch.Generator().manual_seed(2))
    batch["inputs_embeds"].requires_grad_()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach(), "text": batch["inputs_embeds"].grad, **gradients(model)}


@pytest.mark.parametrize("first", [True, False], ids=["convert-offload", "offload-convert"])
@pytest.mark.parametrize("offload", [cpu_offload, disk_offload, dispatch, whole_layers])
def test_offloaded_weights(offload: Any, first: bool, tmp_path: Path) -> None:
    plain = llama()
    model, truth = copy.deepcopy(plain), step(plain)
    offload(plain, tmp_path / "plain")
    if first:
        assert ckptfused.convert(model).fused == 2
    offload(model, tmp_path / "converted")
    if not first:
        report = ckptfused.convert(model)
        own = offload in (dispatch, whole_layers)  # hooks around the layers too
        assert all((LAYER if own else INSIDE) in layer.reason for layer in report.layers), str(report)
        assert {layer.path for layer in report.layers} == {"generic"}
    assert model.model.layers[0].mlp.up_proj.weight.is_meta
    with unfused() as reasons:
        got = step(model)
    assert len(reasons) == (0 if first and offload is whole_layers else 2)
    assert all(INSIDE in reason.text for reason in reasons if first)
    close(got, step(plain), 1e-5)
    close({name: got[name] for name in ("loss", "text")}, {name: truth[name] for name in ("loss", "text")}, 1e-5)
    assert ckptfused.revert(model) == 2
    close(step(model), got, 1e-5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_beside_offloaded_weights(tmp_path: Path) -> None:
    """What is trained with a `device_map`: LoRA, where the weights are in place (PEFT fails on those that are not)."""
    peft = pytest.importorskip("peft")
    plain, model = llama(), llama()
    results = []
    for one in (plain, model):
        dispatch(one, tmp_path / str(len(results)))
        torch.manual_seed(0)
        targets: dict[str, Any] = {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]}
        adapted = peft.get_peft_model(one, peft.LoraConfig(r=4, init_lora_weights=False, **targets)).train()
        if one is model:
            assert {layer.path for layer in ckptfused.convert(adapted).layers} == {"generic"}
        optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
        for _ in range(2):
            results.append(step(adapted))
            optimizer.step()
    assert sum("lora" in name for name in results[0]) == 2 * 2
    for got, want in zip(results[2:], results[:2], strict=True):
        close(got, want, 1e-5)

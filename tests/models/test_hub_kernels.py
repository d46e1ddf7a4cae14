"""Kernels that Hugging Face's `kernels` puts in place of a forward or a function, from a folder instead of the hub."""

from __future__ import annotations

import copy
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("kernels")

import kernels
from transformers.models.llama import modeling_llama

import ckptfused
from tests.models.compare import close, run
from tests.models.small import llama, unfused
from tests.models.zoo import text_batch

# Neither computes what it replaces, so that it is seen whether it ran.
LAYERS = """
from torch import nn


class Norm(nn.Module):
    def forward(self, hidden_states):
        width = hidden_states.shape[-1:]
        return 1.25 * nn.functional.rms_norm(hidden_states, width, self.weight, self.variance_epsilon)


class Rotary(nn.Module):
    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        return q * cos.unsqueeze(unsqueeze_dim), k * cos.unsqueeze(unsqueeze_dim)


class layers:
    pass


layers.Norm, layers.Rotary = Norm, Rotary
"""
ABOUT = {"version": 1, "license": "none", "python-depends": [], "backend": {"type": "cpu"}}


def extensible(patch: pytest.MonkeyPatch) -> None:
    """What transformers does when it is imported with the version of `kernels` that it likes."""
    for name in ("kernel_layer_name", "kernel_condition"):
        patch.setattr(modeling_llama.LlamaRMSNorm, name, None, raising=False)
    kernels.replace_kernel_forward_from_hub(modeling_llama.LlamaRMSNorm, "RMSNorm")
    rotary: Any = modeling_llama.apply_rotary_pos_emb
    if inspect.isfunction(rotary):
        rotary = kernels.use_kernel_forward_from_hub("rotary_pos_emb")(rotary)
        rotary.__name__ = "apply_rotary_pos_emb"
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", rotary)
        patch.setattr(modeling_llama.LlamaAttention, "__init__", modeling_llama.LlamaAttention.__init__)
        kernels.use_kernelized_func(rotary)(modeling_llama.LlamaAttention)
    patch.setattr(rotary, "forward", rotary.forward)  # a kernel in it is for all models


@pytest.mark.parametrize(
    ("layer", "name", "why"),
    [
        ("Norm", "RMSNorm", "unknown norm"),
        ("Rotary", "rotary_pos_emb", "the code of apply_rotary_pos_emb in LlamaAttention"),
    ],
)
def test_kernels_in_the_place_of_others(
    layer: str, name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = {**ABOUT, "id": f"own_{layer.lower()}_1", "name": f"own-{layer.lower()}"}
    (tmp_path / "metadata.json").write_text(json.dumps(about))
    (tmp_path / "__init__.py").write_text(LAYERS)
    extensible(monkeypatch)
    plain = llama()
    before, after = copy.deepcopy(plain), copy.deepcopy(plain)
    own = run(plain, text_batch())
    assert ckptfused.convert(before).fused == 2
    with unfused() as reasons:
        close(run(before, text_batch()), own, 1e-5)
    assert not reasons
    repository = kernels.LocalLayerRepository(tmp_path, layer_name=layer)
    for model in (plain, before, after):
        with kernels.use_kernel_mapping({name: {"cpu": repository}}, inherit_mapping=False):
            kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu")
    report = ckptfused.convert(after)
    assert all(one.path == "generic" and why in one.reason for one in report.layers), str(report)
    want = run(plain, text_batch())
    assert abs(want["loss"] - own["loss"]) > 1e-3
    for model in (before, after):
        with unfused() as reasons:
            close(run(model, text_batch()), want, 1e-5)
        assert len(reasons) == 2 and all(why in reason.text for reason in reasons)

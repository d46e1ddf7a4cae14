"""timm's ViT block, in a model of timm's own."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("timm", exc_type=ImportError)

from timm.layers import RmsNorm
from timm.models.vision_transformer import VisionTransformer

import ckptfused
import tests.models.test_families as families
from tests.models.compare import close, run
from tests.models.small import unfused
from tests.models.zoo import Specimen, randomize
from tests.models.zoo_encoders import images
from tests.models.zoo_torch import Output

pytestmark = pytest.mark.each_torch

SIZES: dict[str, Any] = {"img_size": 20, "patch_size": 5, "embed_dim": 48, "depth": 2, "num_heads": 4, "mlp_ratio": 2}


class Classifier(nn.Module):
    def __init__(self, p: float, implementation: str, **options: Any) -> None:
        super().__init__()
        drops = {"proj_drop_rate": p, "attn_drop_rate": p}
        self.vit = VisionTransformer(**SIZES, **drops, **options, num_classes=4)
        for block in self.vit.blocks:
            block.attn.fused_attn = implementation == "sdpa"

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Output:
        return Output(F.cross_entropy(self.vit(pixel_values), labels))


def specimen(name: str, **options: Any) -> Specimen:
    return Specimen(
        name,
        lambda p, implementation: Classifier(p, implementation, **options),
        images,
        lambda model: list(model.vit.blocks),
        sites=lambda layer: ((0, 0), (0, 1), (0, 2), (0, 3)),
        zero="k_norm.bias",
    )


SPECIMENS = (
    specimen("timm"),
    specimen("timm-qk-norm", qk_norm=True, qkv_bias=False, proj_bias=False),
    specimen("timm-layer-scale", init_values=0.1),
    specimen("timm-rmsnorm", norm_layer=RmsNorm, qk_norm=True, act_layer=nn.SiLU),
)
CASES = [pytest.param(s, i, id=f"{s.name}-{i}") for s in SPECIMENS for i in s.implementations]


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(("specimen", "implementation"), CASES)
def test_float32(specimen: Specimen, implementation: str, mode: str) -> None:
    families.test_float32(specimen, implementation, mode)


@pytest.mark.parametrize(("specimen", "implementation"), CASES)
def test_bfloat16(specimen: Specimen, implementation: str) -> None:
    # The errors themselves are compared: of k_norm.bias, which has no gradient, there is nothing else.
    families.test_bfloat16(dataclasses.replace(specimen, zero=()), implementation)


@pytest.mark.parametrize("keep", ["inputs", "all"])
@pytest.mark.parametrize("specimen", [pytest.param(s, id=s.name) for s in SPECIMENS])
def test_dropout(specimen: Specimen, keep: str) -> None:
    families.drops_as_its_own_layers_do(specimen, keep)


def test_stochastic_depth() -> None:
    """The adapter has none, so that the block is derived; after one seed it leaves out what the plain one does."""
    plain = randomize(Classifier(0.0, "sdpa", drop_path_rate=0.5)).train()
    converted: Any = copy.deepcopy(plain)
    report = ckptfused.convert(converted)
    assert [x.path for x in report.layers] == ["fused", "fused"]  # the first block's rate is 0
    assert report.layers[1].family == "derived"
    torch.manual_seed(3)
    want = run(plain, images())
    with unfused() as reasons:
        torch.manual_seed(3)
        close(run(converted, images()), want, 1e-5)
        close(run(converted.eval(), images()), run(plain.eval(), images()), 1e-5)
    assert not reasons


@pytest.mark.parametrize(
    ("options", "becomes", "why"),
    [
        ({"scale_attn_norm": True}, "part", "layer_norm"),  # its FFN half is derived
        ({"scale_mlp_norm": True}, "part", "layer_norm"),  # its attention half is
    ],
)
def test_what_is_not_fused(options: dict[str, Any], becomes: str, why: str) -> None:
    plain = randomize(Classifier(0.0, "sdpa", **options)).train()
    converted = copy.deepcopy(plain)
    report = ckptfused.convert(converted)
    assert {x.path for x in report.layers} == {becomes} and why in report.layers[0].reason
    close(run(converted, images()), run(plain, images()), 1e-5)


@pytest.mark.parametrize("kind", ["keep", "add", "causal"])
def test_masks(kind: str) -> None:
    plain: Any = randomize(Classifier(0.0, "sdpa")).vit.blocks[0]
    model = nn.Sequential(copy.deepcopy(plain))
    ckptfused.convert(model)
    x = torch.randn(3, 17, 48)
    masks: dict[str, Any] = {
        "keep": {"attn_mask": torch.ones(17, 17, dtype=torch.bool).tril(2)},
        "add": {"attn_mask": torch.randn(3, 1, 17, 17)},
        "causal": {"is_causal": True},
    }[kind]
    with unfused() as reasons:
        torch.testing.assert_close(model[0](x, **masks), plain(x, **masks), rtol=1e-5, atol=1e-5)
    assert not reasons

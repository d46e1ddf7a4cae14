"""timm's ViT block: pre-norm, joint qkv, optional q/k norm; with LayerScale or stochastic depth it is derived."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ckptfused.compat.timm import is_fast
from ckptfused.layer.parts import FFN, Attention, Inputs, Parts, Reason
from ckptfused.layer.projections import rate
from ckptfused.masks import sdpa_mask
from ckptfused.models.family import Family, register


class TimmViT(Family):
    """`timm.models.vision_transformer.Block`."""

    name = "timm_vit"
    layers = ("timm.models.vision_transformer.Block",)

    def parts(self, layer: Any) -> Parts:
        attn, mlp = layer.attn, layer.mlp
        normed = not isinstance(attn.q_norm, nn.Identity)
        return Parts(
            Attention(
                heads=attn.num_heads,
                kv_heads=attn.num_heads,
                head_dim=attn.head_dim,
                q=attn.qkv,
                k=None,
                v=None,
                o=attn.proj,
                pre=layer.norm1,
                q_norm=attn.q_norm if normed else None,
                k_norm=attn.k_norm if normed else None,
                scale=attn.scale,
                p_attn=rate(attn.attn_drop),
                p_res=rate(attn.proj_drop),
                holders=(attn, attn.attn_drop, attn.proj_drop, layer.ls1, layer.drop_path1, attn.norm),
            ),
            FFN(
                mlp.act,
                gate=None,
                up=mlp.fc1,
                down=mlp.fc2,
                pre=layer.norm2,
                p_hidden=rate(mlp.drop1),
                p_res=rate(mlp.drop2),
                holders=(mlp, mlp.drop1, mlp.drop2, layer.ls2, layer.drop_path2, mlp.norm),
            ),
        )

    def inputs(self, layer: Any, x: Tensor, attn_mask: Any = None, is_causal: bool = False) -> Inputs | Reason:
        attn, mlp = layer.attn, layer.mlp
        for place in (layer.ls1, layer.ls2, attn.norm, getattr(mlp, "norm", None)):
            if not isinstance(place, nn.Identity):
                return Reason(f"{type(place).__name__} in the block")
        if attn.gate is not None:
            return Reason("gated attention")
        for path in (layer.drop_path1, layer.drop_path2):
            if path.training and getattr(path, "drop_prob", 0.0):
                return Reason("stochastic depth (drop_path) is active")
        for norm in (layer.norm1, layer.norm2, attn.q_norm, attn.k_norm):
            if is_fast(norm):
                return Reason("timm's fast norm computes in reduced precision")
        if attn_mask is None:
            return Inputs(x, sdpa_mask(None, None, x.size(0), attn.num_heads, x.size(1), is_causal))
        if is_causal or attn_mask.requires_grad:
            return Reason("a mask beside is_causal, or one that needs a gradient", original=is_causal)
        try:
            return Inputs(x, sdpa_mask(attn_mask, None, x.size(0), attn.num_heads, x.size(1)))
        except (TypeError, ValueError) as error:
            return Reason(str(error), original=True)


register(TimmViT())

"""OPT: LayerNorm before each half, or (350m) after it; separate projections; ReLU."""

from __future__ import annotations

from typing import Any

from ckptfused.layer.parts import Parts
from ckptfused.models.families.whisper import parts_named_as_here
from ckptfused.models.family import register
from ckptfused.models.hugging_face import HuggingFace


class OPT(HuggingFace):
    """Both placements of the norms, with biases or without, norms with weights or without."""

    name = "opt"
    layers = ("transformers.models.opt.modeling_opt.OPTDecoderLayer",)
    arguments = ("hidden_states", "attention_mask", "past_key_values", "use_cache", "position_ids")

    def parts(self, layer: Any) -> Parts:
        return parts_named_as_here(layer, "pre" if layer.do_layer_norm_before else "out", 0.0)


register(OPT())

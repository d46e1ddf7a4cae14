"""What a block computes, as data: typed specs, their text form, and the names of their tensors.

The C++ ops take the text form (`BlockSpec.to_string()`) and parse it once. A spec holds everything that
does not need a tensor: norm placements, head layout, mask kinds, dropout probabilities, what is kept for
backward. The tensors travel beside it, in the order of `param_names(spec)` and `AUX_NAMES`.
"""

from .activations import ACTIVATIONS, COEFFICIENTS, GATE, GATED_ACTIVATIONS, GATED_BY, PLAIN_ACTIVATIONS
from .adapters import FIRST_SITE, MOST_ADAPTERS, Adapter
from .block import MOST_TEXTS, BlockSpec, parse
from .checks import check_probability
from .fields import (
    BIASED_NORMS,
    COMPUTE_TYPES,
    MASK_KINDS,
    MAX_HEAD_DIM,
    NORMS,
    OUTPUT_GATES,
    QK_PLACES,
    ROPES,
    AttentionSpec,
    FFNSpec,
)
from .keep import KEEP_NAMES, KEEP_PRESETS, Keep, check_names, keepable, resolve_keep
from .loss import HEAD, LossSpec, parse_loss
from .quantized import BY_BITSANDBYTES, BY_INPUTS, QUANTIZATIONS, Quantized
from .slots import (
    AUX_NAMES,
    COEFFICIENTS_SLOT,
    PARAM_SLOTS,
    PROJECTION_SLOTS,
    QUANT_SLOTS,
    adapter_input,
    adapter_output,
    param_names,
    param_shapes,
    quantized_slots,
    shape_in,
)

__all__ = [
    "ACTIVATIONS",
    "AUX_NAMES",
    "BIASED_NORMS",
    "BY_BITSANDBYTES",
    "BY_INPUTS",
    "COEFFICIENTS",
    "COEFFICIENTS_SLOT",
    "COMPUTE_TYPES",
    "FIRST_SITE",
    "GATE",
    "GATED_ACTIVATIONS",
    "GATED_BY",
    "HEAD",
    "KEEP_NAMES",
    "KEEP_PRESETS",
    "MASK_KINDS",
    "MAX_HEAD_DIM",
    "MOST_ADAPTERS",
    "MOST_TEXTS",
    "NORMS",
    "OUTPUT_GATES",
    "PARAM_SLOTS",
    "PLAIN_ACTIVATIONS",
    "PROJECTION_SLOTS",
    "QK_PLACES",
    "QUANTIZATIONS",
    "QUANT_SLOTS",
    "ROPES",
    "Adapter",
    "AttentionSpec",
    "BlockSpec",
    "FFNSpec",
    "Keep",
    "LossSpec",
    "Quantized",
    "adapter_input",
    "adapter_output",
    "check_names",
    "check_probability",
    "keepable",
    "param_names",
    "param_shapes",
    "parse",
    "parse_loss",
    "quantized_slots",
    "resolve_keep",
    "shape_in",
]

"""Transformer blocks, and their halves, as `torch.nn` modules."""

from ckptfused.eager.activation import geglu, geglu_tanh, gelu_tanh, glu, quick_geglu, quick_gelu, reglu, relu2, swiglu
from ckptfused.layer.activations import XIELU
from ckptfused.layer.norms import GemmaNorm
from ckptfused.modules.grouped_attention import GroupedAttention

from .attention import FusedCheckpointAttention
from .block import FusedCheckpointBlock
from .ffn import FusedCheckpointFFN
from .rotary import RotaryTable
from .sequential import FusedCheckpointSequential

__all__ = [
    "XIELU",
    "FusedCheckpointAttention",
    "FusedCheckpointBlock",
    "FusedCheckpointFFN",
    "FusedCheckpointSequential",
    "GemmaNorm",
    "GroupedAttention",
    "RotaryTable",
    "geglu",
    "geglu_tanh",
    "gelu_tanh",
    "glu",
    "quick_geglu",
    "quick_gelu",
    "reglu",
    "relu2",
    "swiglu",
]

"""Existing models: what each layer is, what is decided of it, and the `forward` that it gets."""

from ckptfused.convert import families as families
from ckptfused.convert.apply import revert
from ckptfused.convert.family import Family, register
from ckptfused.convert.forward import original
from ckptfused.convert.layer_mode import LayerMode
from ckptfused.convert.policy import CheckpointPolicy
from ckptfused.convert.report import HeadReport, LayerReport, Report
from ckptfused.layer.parts import FFN, Attention, Inputs, Parts, Reason

__all__ = [
    "FFN",
    "Attention",
    "CheckpointPolicy",
    "Family",
    "HeadReport",
    "Inputs",
    "LayerMode",
    "LayerReport",
    "Parts",
    "Reason",
    "Report",
    "original",
    "register",
    "revert",
]

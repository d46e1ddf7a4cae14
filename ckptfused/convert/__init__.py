"""One call turns an existing model into a fused-checkpoint model: `convert` and `revert`."""

from ckptfused.convert import families as families
from ckptfused.convert.api import convert, revert
from ckptfused.convert.family import Family, Plan, register
from ckptfused.convert.forward import original
from ckptfused.convert.report import HeadReport, LayerReport, Report
from ckptfused.layer.parts import FFN, Attention, Inputs, Parts, Reason

__all__ = [
    "FFN",
    "Attention",
    "Family",
    "HeadReport",
    "Inputs",
    "LayerReport",
    "Parts",
    "Plan",
    "Reason",
    "Report",
    "convert",
    "original",
    "register",
    "revert",
]

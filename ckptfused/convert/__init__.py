"""One call turns an existing model into a fused-checkpoint model: `convert` and `revert`."""

from ckptfused.convert import families as families
from ckptfused.convert.api import convert
from ckptfused.convert.apply import revert
from ckptfused.convert.family import Family, Plan, register
from ckptfused.convert.forward import original
from ckptfused.convert.policy import CheckpointPolicy, LayerMode
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
    "Plan",
    "Reason",
    "Report",
    "convert",
    "original",
    "register",
    "revert",
]

"""ckptfused: the memory of full activation checkpointing at nearly the step time of none."""

from ckptfused import fake as fake
from ckptfused import rng
from ckptfused.checkpoint import checkpoint, checkpoint_sequential
from ckptfused.conversion import convert
from ckptfused.convert import CheckpointPolicy, LayerMode, original, revert
from ckptfused.doctor import Finding, Findings, doctor
from ckptfused.explain import explain
from ckptfused.info import build_info
from ckptfused.loss import LinearCrossEntropyLoss, linear_cross_entropy
from ckptfused.modules import (
    FusedCheckpointAttention,
    FusedCheckpointBlock,
    FusedCheckpointFFN,
    FusedCheckpointSequential,
)
from ckptfused.policy import BudgetError, plan, profile
from ckptfused.triton.register import register

register()
__version__ = str(build_info()["version"])

__all__ = [
    "BudgetError",
    "CheckpointPolicy",
    "Finding",
    "Findings",
    "FusedCheckpointAttention",
    "FusedCheckpointBlock",
    "FusedCheckpointFFN",
    "FusedCheckpointSequential",
    "LayerMode",
    "LinearCrossEntropyLoss",
    "__version__",
    "build_info",
    "checkpoint",
    "checkpoint_sequential",
    "convert",
    "doctor",
    "explain",
    "linear_cross_entropy",
    "original",
    "plan",
    "profile",
    "revert",
    "rng",
]

"""ckptfused: the memory of full activation checkpointing at nearly the step time of none."""

import os
import sys
from typing import TYPE_CHECKING


def _is_command() -> bool:
    """Whether Python begins with `python -m ckptfused`, or the script of that name."""
    program = (sys.orig_argv[-len(sys.argv) :] or [""])[0]  # what Python was asked to run, before its arguments
    return sys.argv[:1] in (["-m"], [program]) and os.path.basename(program) in ("ckptfused", "-mckptfused")


# The command answers --help and typos without PyTorch, whose import takes seconds; `ckptfused.cli` then loads the rest.
if TYPE_CHECKING or f"{__name__}.cli" in sys.modules or not _is_command():
    from ckptfused import rng
    from ckptfused.checkpoint import checkpoint, checkpoint_sequential
    from ckptfused.convert import CheckpointPolicy, LayerMode, convert, original, revert
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
    from ckptfused.ops import fake as fake
    from ckptfused.planner import BudgetError
    from ckptfused.planner.plan import plan
    from ckptfused.profiler import profile
    from ckptfused.triton.register import register_kernels

    register_kernels()
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

"""`checkpoint` and `checkpoint_sequential`: for everything that is not a transformer block."""

from ckptfused.recompute.checkpoint import checkpoint, checkpoint_sequential

__all__ = ["checkpoint", "checkpoint_sequential"]

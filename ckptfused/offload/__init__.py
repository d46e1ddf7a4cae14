"""Inputs of layers in host memory between forward and backward."""

from ckptfused.offload.calls import Offloader, follow, saving

__all__ = ["Offloader", "follow", "saving"]

"""The plain-PyTorch oracle: what every test compares the fused kernels with.

One small file a stem, written for reading, not for speed. Everything here is ordinary differentiable PyTorch
(the random masks: NumPy), works in any floating type and shares no code with the extension.
"""

from .attention import attention
from .block import dropout_masks, eager_block
from .philox import keep_threshold, philox4x32, philox_mask

__all__ = ["attention", "dropout_masks", "eager_block", "keep_threshold", "philox4x32", "philox_mask"]

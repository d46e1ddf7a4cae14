"""The loss head: a linear layer and its cross-entropy as one op whose logits exist a piece at a time."""

from .function import HeadAdapter, LossOutput, linear_cross_entropy
from .module import LinearCrossEntropyLoss

__all__ = ["HeadAdapter", "LinearCrossEntropyLoss", "LossOutput", "linear_cross_entropy"]

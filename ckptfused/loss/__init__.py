"""The loss head: a linear layer and its cross-entropy as one op whose logits exist a piece at a time."""

from .arguments import HeadAdapter, HeadWeight
from .function import LossOutput, linear_cross_entropy
from .module import LinearCrossEntropyLoss

__all__ = ["HeadAdapter", "HeadWeight", "LinearCrossEntropyLoss", "LossOutput", "linear_cross_entropy"]

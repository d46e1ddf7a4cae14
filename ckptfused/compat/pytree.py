"""PyTorch's trees of containers: `torch.utils._pytree`, 2.11 to 2.13, of which nothing is public."""

from torch.utils._pytree import (
    SUPPORTED_NODES,
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from torch.utils._pytree import _broadcast_to_and_flatten as broadcast_to_and_flatten

__all__ = [
    "SUPPORTED_NODES",
    "TreeSpec",
    "broadcast_to_and_flatten",
    "keystr",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]

"""What ops of PyTorch's that have no kernel for meta tensors allocate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def kernelless(func: Any, copies: list[Tensor]) -> Callable[..., Any]:
    """An op, or what stands for one without a kernel. copies: gets what the op holds until it ends."""
    stand_in = _STAND_INS.get(func.overloadpacket)
    return func if stand_in is None else partial(stand_in, copies)


def _ctc_loss(
    copies: list[Tensor], log_probs: Tensor, targets: Tensor, inputs: Any, lengths: Any, *others: Any
) -> tuple[Tensor, Tensor]:
    """The losses, and the logarithms of the forward variables, which backward needs: of all prefixes of the longest
    target with blanks around each label. log_probs: [T, B, C]. A target whose length is not known is as long as any."""
    steps, batch = log_probs.shape[:2] if log_probs.dim() == 3 else (len(log_probs), 1)
    known = not isinstance(lengths, Tensor) or not lengths.is_meta
    longest = max(map(int, lengths), default=0) if known else targets.size(-1)
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * longest + 1)


def _ctc_loss_backward(
    copies: list[Tensor],
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    inputs: Any,
    lengths: Any,
    losses: Tensor,
    log_alpha: Tensor,
    *others: Any,
) -> Tensor:
    copies.append(torch.empty_like(log_alpha))  # those of the suffixes
    return torch.empty_like(log_probs)


_STAND_INS: dict[Any, Callable[..., Any]] = {
    aten._ctc_loss: _ctc_loss,
    aten._ctc_loss_backward: _ctc_loss_backward,
}

"""Buffers under FSDP1, FSDP2, HSDP and DDP: what these move are parameters, so buffers are updated once there, too."""

from __future__ import annotations

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from tests.models.ranks import Ranks
from tests.recompute import wrapped_steps

pytestmark = pytest.mark.each_torch


@pytest.mark.parametrize("name", wrapped_steps.WRAPPERS)
def test_state_is_updated_once(ranks: Ranks, name: str) -> None:
    ranks.run(wrapped_steps.once, name=name)


@pytest.mark.parametrize("name", wrapped_steps.WRAPPERS)
def test_a_buffer_changed_before_backward_raises(ranks: Ranks, name: str) -> None:
    ranks.run(wrapped_steps.changed, name=name)

"""The doctor where processes are joined: FSDP2, FSDP1, DDP, and policies that differ."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from tests.doctor import ranks_steps as steps
from tests.models.ranks import Ranks

pytestmark = pytest.mark.once


@pytest.mark.slow
@pytest.mark.parametrize("right", [False, True])
def test_the_wrapper_of_accelerate_under_fsdp2(ranks: Ranks, right: bool) -> None:
    ranks.run(steps.as_accelerate, right=right)


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("original_parameters", [False, True])
def test_wrappers_under_fsdp1(ranks: Ranks, right: bool, original_parameters: bool) -> None:
    ranks.run(steps.under_fsdp1, right=right, original_parameters=original_parameters)


@pytest.mark.parametrize("around", ["fsdp2", "ddp", "fsdp1"])
@pytest.mark.parametrize("how", ["converted", "hugging face"])
def test_what_is_right_is_certified(ranks: Ranks, how: str, around: str) -> None:
    ranks.run(steps.certified, how=how, around=around)


def test_policies_that_differ(ranks: Ranks) -> None:
    ranks.run(steps.differing)


@pytest.mark.parametrize("certain", [True, False])
def test_a_fault_on_one_rank(ranks: Ranks, certain: bool) -> None:
    ranks.run(steps.at_fault_on_one, certain=certain)

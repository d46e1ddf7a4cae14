"""DeepSpeed's ZeRO on two processes over gloo: losses and gradients as of the unconverted model."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

pytest.importorskip("transformers")

from tests.models.ranks import Ranks

pytestmark = pytest.mark.each_torch


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Ranks of its own: DeepSpeed joins its processes itself."""
    if importlib.util.find_spec("deepspeed") is None:  # only the ranks import it
        pytest.skip("could not import 'deepspeed'")
    found = Ranks()
    yield found
    found.stop()


@pytest.mark.parametrize("first", [True, False], ids=["convert-initialize", "initialize-convert"])
@pytest.mark.parametrize(("stage", "whole_layers"), [(2, False), (3, False), (3, True)])
def test_zero(ranks: Ranks, stage: int, whole_layers: bool, first: bool) -> None:
    from tests.models import deepspeed_steps

    ranks.run(deepspeed_steps.zero, stage=stage, whole_layers=whole_layers, first=first)


@pytest.mark.parametrize("whole_layers", [False, True])
def test_adapters(ranks: Ranks, whole_layers: bool) -> None:
    from tests.models import deepspeed_steps

    ranks.run(deepspeed_steps.zero, stage=3, whole_layers=whole_layers, first=False, adapters=True)

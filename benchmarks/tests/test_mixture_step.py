"""The step of mixtures: gradients come before figures, and a layer that is converted holds less."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks import mixture_step
from benchmarks.mixture_step import CHECKPOINTED, CONVERTED, PLAIN, MixtureSizes

pytestmark = pytest.mark.once


@pytest.mark.slow
def test_a_small_run(measured: Any) -> None:
    stem, _, rows = measured("mixture-step --model mixtral --layers 2 --tokens 64")
    assert stem == "mixture-2x512" and list(rows) == [PLAIN, CHECKPOINTED, CONVERTED]
    assert rows[CONVERTED]["alive"] <= rows[CHECKPOINTED]["alive"] + 2 * 2 * 64 * 2 * 2 < rows[PLAIN]["alive"]


def test_a_wrong_gradient_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    right = mixture_step.converted

    def faulty(plain: Any) -> Any:
        model = right(plain)
        model.model.layers[0].mlp.gate.weight.data[0] += 1
        return model

    monkeypatch.setattr(mixture_step, "converted", faulty)
    with pytest.raises(SystemExit, match="gradient check failed, no time reported"):
        mixture_step.check(MixtureSizes(model="mixtral", layers=1, tokens=32))

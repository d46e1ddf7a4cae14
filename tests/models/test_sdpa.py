"""A function in the place of `F.scaled_dot_product_attention`: converted layers that have attention call it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

pytest.importorskip("transformers")

import ckptfused
from tests.models import zoo_decoders, zoo_encoders, zoo_llama, zoo_moe, zoo_seq2seq, zoo_torch  # noqa: F401
from tests.models.compare import close, run
from tests.models.small import unfused
from tests.models.zoo import ZOO, randomize

pytestmark = pytest.mark.each_torch

OWN = F.scaled_dot_product_attention
NAMES = ("llama", "gpt2", "phi3", "bert", "vit", "mixtral", "whisper", "torch-encoder-pre", "torch-decoder-post")
SAID = "scaled_dot_product_attention is not PyTorch's own"
Replaced = Callable[[], AbstractContextManager[list[int]]]


@contextmanager
def another_function() -> Iterator[list[int]]:
    calls: list[int] = []

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        return -3 * OWN(*args, **kwargs)

    F.scaled_dot_product_attention = attention
    try:
        yield calls
    finally:
        F.scaled_dot_product_attention = OWN


class _Mode(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is OWN:
            self.calls.append(1)
            return -3 * OWN(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


@contextmanager
def a_mode() -> Iterator[list[int]]:
    with _Mode() as mode:
        yield mode.calls


def models(name: str) -> tuple[Any, Any]:
    specimen = ZOO[name]
    plain = randomize(specimen.make(0.0, specimen.implementations[0])).train()
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    return plain, converted


@pytest.mark.parametrize("there", [another_function, a_mode], ids=["function", "mode"])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_called(name: str, there: Replaced) -> None:
    if there is a_mode and name.startswith("torch"):
        pytest.skip("a mode does not see the calls within F.multi_head_attention_forward")
    plain, converted = models(name)
    batch = ZOO[name].batch()
    own = run(plain, batch)
    with there() as calls:
        want = run(plain, batch)
        assert calls
        del calls[:]
        with unfused() as reasons:
            got = run(converted, batch)
        assert calls
        report = ckptfused.convert(copy.deepcopy(plain))
    assert reasons
    assert all(SAID in reason.text for reason in reasons)
    assert all((layer.path, SAID in layer.reason) == ("generic", True) for layer in report.layers)
    assert not torch.allclose(want["loss"], own["loss"])
    close(got, want, 1e-5)
    with unfused() as reasons:
        fused = run(converted, batch)
    assert not reasons
    rounding = [key for key in own if ZOO[name].zero and key.endswith(ZOO[name].zero)]  # their gradient is exactly 0
    close(*({key: g for key, g in found.items() if key not in rounding} for found in (fused, own)), 1e-5)


def test_a_replay_elsewhere_raises() -> None:
    """Backward has to run where the function of the forward is."""
    _, converted = models("llama")
    with another_function():
        loss = converted(**ZOO["llama"].batch()).loss
    with pytest.raises(RuntimeError, match="Run backward within the same context"):
        loss.backward()


def test_in_a_layer_of_which_half_is_generic() -> None:
    """The cross attention of a decoder, whose own attention's replacement is taken for all of the layer."""
    _, converted = models("whisper")
    loss = converted(**ZOO["whisper"].batch()).loss
    with another_function(), pytest.raises(RuntimeError, match="Run backward within the same context"):
        loss.backward()

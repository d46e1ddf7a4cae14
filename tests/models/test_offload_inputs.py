"""`convert(model, offload=True)` on models of Hugging Face: the same bits, and which inputs move."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from torch import Tensor

import ckptfused
from tests.models import test_families as families
from tests.models import zoo_decoders, zoo_encoders, zoo_llama, zoo_moe, zoo_seq2seq  # noqa: F401
from tests.models.compare import run
from tests.models.zoo import ZOO, Specimen
from tests.offload.fake import faked

# How many inputs go to the host: those of all ops and checkpointed pieces but for the last one's, and but for what is
# made again: each layer has one.
LEAVING = {"llama": 1, "gpt2": 1, "bert": 1, "mixtral": 1, "whisper": 3}

# What is made again asks for a layer's input, and so does the attention half's backward; the one that was saved before
# is on its way by then.
COMING = {"mixtral": [0, 0], "whisper": [2, 1, 2, 0]}


def step(model: Any, specimen: Specimen) -> dict[str, Tensor]:
    torch.manual_seed(7)
    return run(model, specimen.batch())


@pytest.mark.parametrize("late", [True, False], ids=["late", "soon"])
@pytest.mark.parametrize("name", LEAVING)
def test_bits(name: str, late: bool) -> None:
    specimen = ZOO[name]
    model = families.converted(families.build(specimen, 0.25, "sdpa"), specimen)
    want = step(copy.deepcopy(model), specimen)
    ckptfused.convert(model, offload=True)
    with faked(late) as copies:
        got = step(model, specimen)
    assert got.keys() == want.keys() and all(torch.equal(got[name], value) for name, value in want.items())
    assert copies.moved("out") == [*range(LEAVING[name])]
    assert copies.moved("in") == COMING.get(name, copies.moved("out")[::-1])
    assert copies.most <= 2 and copies.held() == 0


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
def test_with_the_librarys_own_checkpointing_switched_on() -> None:
    """It has nothing to do around a fused layer; a layer that is not fused runs under it."""
    specimen = ZOO["llama"]
    model: Any = families.build(specimen, 0.0, "sdpa")
    ckptfused.convert(model, offload=True)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    want = step(copy.deepcopy(model), specimen)
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda *args: None)
    with faked() as copies:
        got = step(model, specimen)
    assert all(torch.allclose(got[name], value, rtol=1e-4, atol=1e-6) for name, value in want.items())
    assert copies.moved("out") == copies.moved("in") == [0]


def test_loss_in_chunks_beside_it() -> None:
    specimen = ZOO["llama"]
    model = families.build(specimen, 0.0, "sdpa")
    ckptfused.convert(model, loss="chunked")
    want = step(copy.deepcopy(model), specimen)
    report = ckptfused.convert(model, loss="chunked", offload=True)
    assert "offload" in str(report)
    with faked() as copies:
        got = step(model, specimen)
    assert all(torch.equal(got[name], value) for name, value in want.items())
    assert copies.moved("out") == copies.moved("in") == [0]

"""Liger's kernels in a Hugging Face model, in Triton's interpreter: converted layers run them, checkpointed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

import ckptfused

pytestmark = pytest.mark.filterwarnings("ignore")  # Liger's own, about backends that it does not find


@pytest.fixture(autouse=True)
def _floats_and_roots(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Arguments of type float, which the interpreter leaves as they are, and a root that it has no library for.

    What Liger does to transformers is undone.
    """
    pytest.importorskip("transformers")
    norms = pytest.importorskip("liger_kernel.ops.rms_norm")
    from transformers.models.llama import modeling_llama

    convert = interpreter._implicit_cvt

    def with_floats(value: Any) -> Any:
        if isinstance(value, float):
            return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)
        return convert(value)

    monkeypatch.setattr(interpreter, "_implicit_cvt", with_floats)
    monkeypatch.setattr(norms, "rsqrt", lambda x: tl.rsqrt(x))
    before = dict(vars(modeling_llama))
    forwards = {cls: cls.forward for cls in (modeling_llama.LlamaMLP, modeling_llama.LlamaForCausalLM)}
    yield
    vars(modeling_llama).update(before)
    for cls, forward in forwards.items():
        cls.forward = forward


ONLY: dict[str, dict[str, bool]] = {
    "all": {},
    "rope": {"rms_norm": False, "swiglu": False, "fused_linear_cross_entropy": False},
    "swiglu": {"rope": False, "rms_norm": False, "fused_linear_cross_entropy": False},
    "norms": {"rope": False, "swiglu": False, "fused_linear_cross_entropy": False},
}
WHY = {"all": "", "rope": "apply_rotary_pos_emb in LlamaAttention", "swiglu": "MLP", "norms": "norm"}


@pytest.mark.parametrize("when", ["before the model is made", "to a model", "to a converted model"])
@pytest.mark.parametrize("what", ONLY)
def test_liger(what: str, when: str) -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    from tests.models.compare import close, run
    from tests.models.small import llama, unfused
    from tests.models.zoo import text_batch

    if when == "before the model is made":
        apply_liger_kernel_to_llama(**ONLY[what])
    plain = llama(num_hidden_layers=1)
    model = copy.deepcopy(plain)
    if when == "to a converted model":
        assert ckptfused.convert(model).fused == 1
    if when != "before the model is made":
        for one in (plain, model):
            apply_liger_kernel_to_llama(model=one, **ONLY[what])
    if when != "to a converted model":
        report = ckptfused.convert(model)
        assert report.layers[0].path == "generic" and WHY[what] in report.layers[0].reason, str(report)
    with unfused() as reasons:
        got = run(model, text_batch())
    assert len(reasons) == 1 and WHY[what] in reasons[0].text
    close(got, run(plain, text_batch()), 1e-5)

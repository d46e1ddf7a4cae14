"""What explain() says of a CUDA tensor, without a GPU: x is a fake one, the device's properties are stated here."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ckptfused import FusedCheckpointAttention, FusedCheckpointBlock, FusedCheckpointFFN
from ckptfused._extension import _C
from ckptfused.explain import Explanation, _fused
from ckptfused.modules.fused import FusedModule
from ckptfused.triton import backend, tuning
from tests.accounting import Events

WIDTH, HIDDEN = 64, 96
SHAPE = (2, 33, WIDTH)
MISSING = "Triton, which attention needs here, is not installed: this call will raise."


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of which nothing was measured, Triton, and no override."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(tuning, "_cuda_device", lambda index: tuning.DeviceKey("NVIDIA H100 80GB HBM3", (9, 0)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tuning, "_table", dict)
    monkeypatch.setattr(tuning, "_has_triton", lambda: True)
    monkeypatch.setattr(backend, "has_triton", lambda: True)
    choose(monkeypatch, attention=None, ffn=None)


def choose(monkeypatch: pytest.MonkeyPatch, attention: str | None, ffn: str | None) -> None:
    """Chooses kernels like CKPTFUSED_ATTENTION and CKPTFUSED_FFN, which are read once."""
    monkeypatch.setattr(backend, "attention_backend", partial(ATTENTION_BACKEND, override=attention))
    monkeypatch.setattr(tuning, "override", lambda: ffn)


ATTENTION_BACKEND = backend.attention_backend


def llama(**options: Any) -> FusedCheckpointBlock:
    return FusedCheckpointBlock.llama(WIDTH, 4, dim_feedforward=HIDDEN, **options)


def on_cuda(block: FusedModule, dtype: torch.dtype = torch.bfloat16, lora: str = "", **masks: Any) -> Explanation:
    call = block.to(dtype).prepare(torch.zeros(SHAPE, dtype=dtype), **masks)
    with FakeTensorMode():
        x = torch.empty(SHAPE, dtype=dtype, device="cuda")
    return _fused("title", call._replace(x=x, text=f"{call.text}{lora}"))


def kernels(found: Explanation) -> dict[str, str]:
    return {step.name: step.kernel for step in found.steps}


def test_every_step_of_a_block() -> None:
    assert kernels(on_cuda(llama(), lora=" attn.lora=q:4:2.0:0.1")) == {
        "norm before attention": "CUDA C++",
        "QKV product": "cuBLAS",
        "adapters of q": "PyTorch's products",
        "q, k": "CUDA C++",
        "attention": "cuDNN through PyTorch",
        "output projection": "cuBLAS",
        "residual of attention": "CUDA C++",
        "norm before FFN": "(residual of attention)",
        "gate and up products": "cuBLAS",
        "activation": "CUDA C++",
        "down product": "cuBLAS",
        "tiles of the FFN": "",
        "residual of FFN": "CUDA C++",
    }


@pytest.mark.parametrize(
    "block",
    [
        llama(),
        llama(keep="all"),
        FusedCheckpointBlock(WIDTH, 4, HIDDEN, batch_first=True),
        FusedCheckpointBlock(WIDTH, 4, HIDDEN, norm_first=True, batch_first=True),
        FusedCheckpointFFN(WIDTH, HIDDEN, norm_first=True, batch_first=True),
    ],
    ids=["llama", "all", "post-norm", "pre-norm", "FFN alone"],
)
def test_norms_with_a_kernel_of_their_own(block: FusedModule) -> None:
    own = [name for name, kernel in kernels(on_cuda(block)).items() if name.startswith("norm") and kernel == "CUDA C++"]
    x = torch.zeros(SHAPE, dtype=torch.bfloat16)
    assert len(own) == Events(lambda: block(x)).count("ckptfused::norm_fwd")  # the same steps on every device


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "not gated"])
def test_the_activation_is_in_the_fused_product(monkeypatch: pytest.MonkeyPatch, gated: bool) -> None:
    choose(monkeypatch, attention=None, ffn="triton")
    first = "gate and up products" if gated else "up product"
    found = on_cuda(llama(ffn_dropout=0.1, **({} if gated else {"activation": "relu"})))
    assert found.step(first).kernel.startswith("Triton (m")
    assert found.step(first).reason == "CKPTFUSED_FFN=triton, the default tile: this shape was not measured"
    assert found.step("activation").kernel == f"({first})"
    assert "dropout 0.1 in one pass" in found.step("activation").reason


@pytest.mark.parametrize("why", ["float32", "a norm behind", "no rows"])
def test_where_the_fused_product_is_not_for(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    choose(monkeypatch, attention=None, ffn="triton")
    if why == "no rows":
        monkeypatch.setitem(globals(), "SHAPE", (2, 0, WIDTH))
    post = FusedCheckpointBlock(WIDTH, 4, HIDDEN, batch_first=True)
    found = kernels(on_cuda(post if why == "a norm behind" else llama(), getattr(torch, why, torch.bfloat16)))
    assert found.get("gate and up products", found.get("up product")) == "cuBLAS"
    assert found["activation"] == "CUDA C++"


PADDING = torch.zeros(2, 33, dtype=torch.bool)


@pytest.mark.parametrize(
    ("options", "masks", "special"),
    [
        ({"attention_dropout": 0.1}, {}, "dropout"),
        ({"window": 5}, {}, "window"),
        ({"window": 500}, {}, ""),
        ({"softcap": 5.0}, {}, "soft cap"),
        ({"scale": -0.5}, {}, "scale of 0 or less"),
        ({"window": 5, "softcap": 5.0}, {"src_key_padding_mask": PADDING}, "padding, no window, no soft cap"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_pytorchs_kernels_lack_is_named(
    device: str, options: dict[str, Any], masks: dict[str, Any], special: str
) -> None:
    block = llama(**options)
    found = on_cuda(block, **masks) if device == "cuda" else _fused("", block.prepare(torch.zeros(SHAPE), **masks))
    step, name = found.step("attention"), "PyTorch's kernels have" if device == "cuda" else "PyTorch's kernel has"
    if special:
        assert (step.kernel, step.reason) == ("Triton" if device == "cuda" else "our tiles", f"{name} no {special}")
    else:
        assert step.kernel == ("cuDNN through PyTorch" if device == "cuda" else "PyTorch's flash kernel")


@pytest.mark.parametrize("chosen", [None, "flash", "cudnn", "triton"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("keep", ["inputs", "attention"])
def test_the_kernel_of_attention(
    monkeypatch: pytest.MonkeyPatch, keep: str, deterministic: bool, chosen: str | None
) -> None:
    """cuDNN's where its gradient may differ from run to run; its plans' cost is told."""
    choose(monkeypatch, attention=chosen, ffn=None)
    torch.use_deterministic_algorithms(deterministic)
    found = on_cuda(llama(keep=keep))
    cudnn = chosen in (None, "cudnn") and not deterministic
    names = {"triton": "Triton"} | ({chosen: "cuDNN through PyTorch"} if cudnn else {})
    assert found.step("attention").kernel == names.get(chosen, "PyTorch's flash kernel")
    plans = [note for note in found.notes if "plans" in note]
    assert len(plans) == cudnn and all(("that of forward" in note) == (keep == "inputs") for note in plans)


@pytest.mark.parametrize("there", [True, False])
def test_triton_that_is_missing(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setattr(backend, "has_triton", lambda: there)
    monkeypatch.setattr(tuning, "_has_triton", lambda: there)
    assert MISSING not in on_cuda(llama()).notes  # PyTorch's kernel does it
    attention = FusedCheckpointAttention(WIDTH, 4, 0.1, batch_first=True)
    for block in (llama(dropout=0.1), attention, attention.requires_grad_(False)):
        assert (MISSING in on_cuda(block).notes) == (not there)
    choose(monkeypatch, attention=None, ffn="triton")
    if there:
        on_cuda(llama())
    else:
        with pytest.raises(RuntimeError, match="CKPTFUSED_FFN=triton: Triton is not installed"):  # as forward does
            on_cuda(llama())


def test_a_build_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for architectures, said in (("sm_90", False), ("", True)):
        monkeypatch.setattr(_C, "cuda_architectures", architectures)
        assert any("built for the CPU alone" in note for note in on_cuda(llama()).notes) == said

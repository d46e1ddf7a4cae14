"""Weights that get other memory between forward and backward, of which no version tells: an error, never numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptfused
from ckptfused import FusedCheckpointBlock
from ckptfused.loss import linear_cross_entropy

pytestmark = [
    pytest.mark.each_torch,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

Made = tuple[nn.Module, Callable[[nn.Module], Tensor]]
MOVED = "got other memory since forward"


def block() -> Made:
    """Trained."""
    torch.manual_seed(0)
    x = torch.randn(2, 8, 64, requires_grad=True)
    return FusedCheckpointBlock(64, 4, 128), lambda module: module(x).sum()  # type: ignore[no-any-return]


def frozen() -> Made:
    """Below it is something that trains."""
    module, loss = block()
    return module.requires_grad_(False), loss


def head() -> Made:
    """The chunked loss."""
    torch.manual_seed(0)
    x, target = torch.randn(12, 32, requires_grad=True), torch.randint(0, 50, (12,))
    # With a weight that trains gradients are made in forward, and only scaled later.
    return (
        nn.Linear(32, 50, bias=False).requires_grad_(False),
        lambda module: linear_cross_entropy(x, module.weight, target, keep="inputs"),  # type: ignore[arg-type]
    )


def mixture() -> Made:
    """Experts of a converted model."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.MixtralConfig(**sizes, num_key_value_heads=2, vocab_size=50, num_local_experts=4)
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).train()
    ckptfused.convert(model)
    ids = torch.randint(0, 50, (2, 9))
    return model, lambda module: module(input_ids=ids, labels=ids, use_cache=False).loss


def in_few_bits() -> Made:
    """A frozen base of bitsandbytes below LoRA."""
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    from tests.models.small import llama
    from tests.models.test_other_quantised import Way, _bitsandbytes, _replaced, stored

    model = stored(Way("nf4", _replaced(_bitsandbytes)))
    assert {layer.path for layer in ckptfused.convert(model).layers} == {"fused"}
    ids = torch.randint(0, llama().config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))
    return model, lambda module: module(input_ids=ids, labels=ids, use_cache=False).loss


def weights(module: nn.Module) -> list[Any]:
    """The matrices of layers and of a head."""
    found = [
        p for name, p in module.named_parameters() if p.dim() > 1 and "embed" not in name and "lm_head" not in name
    ]
    return [p for p in found if not p.requires_grad] or found


@pytest.mark.parametrize("make", [block, frozen, head, mixture, in_few_bits])
def test_other_memory_raises(make: Callable[[], Made]) -> None:
    """Each weight by itself."""
    module, loss_of = make()
    for number in range(len(weights(module))):
        loss, p = loss_of(module), weights(module)[number]
        was, p.data = p.data, p.data.clone()
        with pytest.raises(RuntimeError, match=MOVED):
            loss.backward()
        p.data = was


@pytest.mark.parametrize("make", [block, frozen, head, in_few_bits])
def test_parameters_that_deepspeed_gathers_may_move(make: Callable[[], Made]) -> None:
    """ZeRO-3 takes a parameter's memory after forward, and gives it other memory for backward. `ds_id`."""
    found: list[list[Tensor]] = []
    for moves in (False, True):
        module, loss_of = make()
        for number, p in enumerate(weights(module)):
            p.ds_id = number
        loss = loss_of(module)
        for p in weights(module) if moves else ():
            whole, p.data = p.data, torch.empty(0, dtype=p.dtype)
            p.data = whole.clone()
        loss.backward()
        found.append([p.grad for p in module.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1])
    assert all(map(torch.equal, *found))


def test_a_model_that_moves_between_raises() -> None:
    module, loss_of = block()
    loss = loss_of(module)
    module.bfloat16()
    with pytest.raises(RuntimeError, match=MOVED):
        loss.backward()


def test_memory_that_is_given_back_and_filled_again_is_the_same() -> None:
    """FSDP does so: the storage stays."""
    module, loss_of = block()
    loss = loss_of(module)
    contents = [(p, p.detach().clone()) for p in module.parameters()]
    sizes = [p.untyped_storage().nbytes() for p, _ in contents]
    for p, _ in contents:
        p.untyped_storage().resize_(0)
    for (p, content), size in zip(contents, sizes, strict=True):
        p.untyped_storage().resize_(size)
        p.data.copy_(content)
    loss.backward()
    other, loss_of = block()
    loss_of(other).backward()
    assert all(map(torch.equal, [p.grad for p in module.parameters()], [p.grad for p in other.parameters()]))

"""Models whose stacks of experts bitsandbytes stores in 4 bits (`replace_parameter_4bit`)."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

bnb = pytest.importorskip("bitsandbytes.nn.parametrize")
peft = pytest.importorskip("peft")

import ckptfused  # noqa: E402
from ckptfused.models.experts.install import is_converted  # noqa: E402
from ckptfused.models.experts.read import is_experts  # noqa: E402
from tests.accounting import saved_bytes  # noqa: E402
from tests.models.test_experts import MODELS, build, routers, step  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Could not find any LoRA parametrization"),  # PEFT's own, of stored stacks
]

WAYS = [("nf4", False), ("nf4", True), ("fp4", True)]
ways = pytest.mark.parametrize(("kind", "nested"), WAYS, ids=str)


def stacks(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if is_experts(module)]


def packed(name: str, kind: str = "nf4", nested: bool = False, dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    """A small mixture whose experts are stored; attention and norms train."""
    model = build(name, **sizes).to(dtype).requires_grad_(False)
    for key, p in model.named_parameters():
        p.requires_grad_("self_attn" in key or "norm" in key)
    for module in stacks(model):
        for weight in ("gate_up_proj", "down_proj"):
            bnb.replace_parameter_4bit(module, weight, compress_statistics=nested, quant_type=kind)
    return model


def converted(model: Any, **options: Any) -> Any:
    report = ckptfused.convert(model, **options)
    assert not any("run as they did" in note for note in report.notes), str(report)
    assert all(map(is_converted, stacks(model)))
    return model


def near(got: dict[Any, Tensor], want: dict[Any, Tensor]) -> None:
    """Other orders of sums in float32."""
    assert got.keys() == want.keys()
    assert all((got[key] - want[key]).norm() <= 1e-5 * want[key].norm() for key in want)


@ways
@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_one_call_of_the_router(name: str, kind: str, nested: bool) -> None:
    plain, model = packed(name, kind, nested), converted(packed(name, kind, nested))
    calls: Counter[int] = Counter()
    for number, router in enumerate(routers(model)):
        router.register_forward_hook(lambda *call, number=number: calls.update([number]))
    near(step(model)[1], step(plain)[1])
    assert calls
    assert set(calls.values()) == {1}


@pytest.mark.parametrize("name", MODELS)
def test_nothing_more_is_saved_than_beside_numbers(name: str) -> None:
    """Their hooks on a module of experts are nobody's who watches it."""
    kind, nested = WAYS[[*MODELS].index(name) % len(WAYS)]
    ids = torch.randint(0, 50, (2, 9))
    found = []
    for model in (packed(name, kind, nested), build(name).requires_grad_(False)):
        for key, p in model.named_parameters():
            p.requires_grad_(p.is_floating_point() and ("self_attn" in key or "norm" in key))
        converted(model)
        states = [
            made_by[0].quant_state for m in stacks(model) for made_by in getattr(m, "parametrizations", {}).values()
        ]
        parts = [
            t
            for s in states
            for t in (s.absmax, s.code, s.offset, *((s.state2.absmax, s.state2.code) if nested else ()))
        ]
        call = lambda: model(input_ids=ids, labels=ids, use_cache=False).loss  # noqa: E731, B023
        found.append(saved_bytes(call, model, [ids, *(t for t in parts if t is not None)]))
    assert found[0] == found[1]


def test_bits_do_not_depend_on_what_is_kept() -> None:
    found = []
    for keep in ("all", "inputs", "attention"):
        model = converted(packed("mixtral", "nf4", True, torch.bfloat16, attention_dropout=0.3), keep=keep)
        torch.manual_seed(3)
        found.append(step(model)[1])
    assert all(torch.equal(other[key], found[0][key]) for other in found[1:] for key in found[0])


@ways
@pytest.mark.parametrize("weight", ["gate_up_proj", "down_proj"])
def test_adapters_of_experts(weight: str, kind: str, nested: bool) -> None:
    """PEFT's `target_parameters`, never merged into numbers of the base. Of stored stacks it takes whole names alone,
    and one a module."""
    names = [f"model.layers.{number}.mlp.experts.{weight}" for number in (0, 1)]
    found = []
    for convert in (False, True):
        model = packed("mixtral", kind, nested)
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=names, init_lora_weights=False)
        model = peft.get_peft_model(model, config).train()
        if convert:
            report = ckptfused.convert(model)
            assert not any("run as they did" in note or "PEFT" in note for note in report.notes), str(report)
        found.append(step(model)[1])
    near(found[1], found[0])
    assert sum("experts" in str(key) for key in found[0]) == 2 * 2


def test_a_prediction_is_no_lower_than_a_step() -> None:
    model, ids = converted(packed("mixtral")), torch.randint(0, 50, (2, 9))
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    predicted, measured = ckptfused.profile(model, batch, device="cpu"), ckptfused.profile(model, batch)
    assert predicted.weights == measured.weights < sum(p.nbytes for p in build("mixtral").parameters())
    assert measured.peak <= predicted.peak <= 1.3 * measured.peak  # the most crowded router


@pytest.mark.parametrize("what", ["absmax", "codes", "memory", "object"])
def test_what_changes_before_backward_raises(what: str) -> None:
    model = converted(packed("mixtral", num_hidden_layers=1))
    ids = torch.randint(0, 50, (2, 9))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    held = stacks(model)[0].parametrizations["down_proj"]
    if what == "absmax":
        held[0].quant_state.absmax.mul_(1)
    elif what == "codes":
        held.original.add_(0)
    elif what == "object":
        held[0].quant_state.absmax = held[0].quant_state.absmax * 2
    else:
        held.original.data = held.original.data.clone()
    said = {"memory": "got other memory", "object": "was replaced between"}.get(what, "modified by an inplace")
    with pytest.raises(RuntimeError, match=said):
        loss.backward()


def test_a_state_that_is_replaced_counts_from_the_next_call() -> None:
    plain, model = packed("mixtral"), converted(packed("mixtral"))
    for each in (plain, model):
        step(each)
        each.zero_grad()
        for module in stacks(each):
            state = module.parametrizations["down_proj"][0].quant_state
            state.absmax = state.absmax * 2
    near(step(model)[1], step(plain)[1])


def test_stacks_that_are_stored_after_convert() -> None:
    plain, model = packed("mixtral"), build("mixtral").requires_grad_(False)
    for key, p in model.named_parameters():
        p.requires_grad_("self_attn" in key or "norm" in key)
    converted(model)
    for module in stacks(model):
        for weight in ("gate_up_proj", "down_proj"):
            bnb.replace_parameter_4bit(module, weight)
    near(step(model)[1], step(plain)[1])


def test_a_hook_beside_theirs_runs() -> None:
    model, calls = packed("mixtral", num_hidden_layers=1), []
    stacks(model)[0].register_forward_hook(lambda *call: calls.append(1))
    report = ckptfused.convert(model)
    assert any("it has a hook or a forward of its own" in note for note in report.notes)
    step(model)
    assert calls


def test_experts_that_begin_within_blocks_of_scales() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16}
    plain, model = (packed("mixtral", "nf4", True, **sizes) for _ in range(2))
    near(step(converted(model))[1], step(plain)[1])


@pytest.mark.parametrize("checkpointed", ["layer", "experts", "segments"])
def test_within_a_checkpoint_of_somebody(checkpointed: str) -> None:
    plain, model = packed("mixtral"), packed("mixtral")
    converted(model, **({"policy": ckptfused.CheckpointPolicy.segments(1)} if checkpointed == "segments" else {}))
    if checkpointed == "layer":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if checkpointed == "experts":
        for layer in model.model.layers:
            layer.mlp.forward = partial(torch.utils.checkpoint.checkpoint, layer.mlp.forward, use_reentrant=False)
    near(step(model)[1], step(plain)[1])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo's, of bitsandbytes' hooks
def test_compiled_it_keeps_no_numbers() -> None:
    (experts,) = stacks(converted(packed("mixtral", num_hidden_layers=1)))
    call = (torch.randn(7, 32, requires_grad=True), torch.rand(7, 4).topk(2).indices, torch.rand(7, 2))
    (expected,) = torch.autograd.grad(experts(*call).square().sum(), call[0])
    compiled = torch.compile(experts, backend="aot_eager")
    (found,) = torch.autograd.grad(compiled(*call).square().sum(), call[0])
    assert torch.equal(found, expected)
    numbers = experts.gate_up_proj.nbytes + experts.down_proj.nbytes
    assert saved_bytes(lambda: compiled(*call), experts, call) < numbers / 4


@pytest.mark.parametrize("where", ["parametrization", "list"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_on_what_makes_the_numbers_runs(where: str, when: str) -> None:
    plain, model = packed("mixtral"), packed("mixtral")
    if when == "after":
        converted(model)
    for each in (plain, model):
        for module in stacks(each):
            made_by = module.parametrizations["down_proj"]
            (made_by[0] if where == "parametrization" else made_by).register_forward_hook(lambda m, args, y: y * 2)
    if when == "before":
        report = ckptfused.convert(model)
        assert any("torch.nn.utils.parametrize makes its down_proj" in note for note in report.notes)
    near(step(model)[1], step(plain)[1])


def test_a_replay_that_ends_early_leaves_no_numbers_behind() -> None:
    """bitsandbytes 0.49 counts forwards that began and that ended; here those of experts that are replayed."""
    model = packed("mixtral")
    for module in stacks(model):
        module._forward_hooks_always_called.clear()
        module.register_forward_hook(lambda m, args, y: None)
    ckptfused.convert(model)
    for _ in range(2):
        step(model)
        assert torch.nn.utils.parametrize._cache_enabled == 0 and not torch.nn.utils.parametrize._cache


@pytest.mark.parametrize("what", ["all", "scales"])
def test_made_in_inference_mode(what: str) -> None:
    plain, model = packed("mixtral"), packed("mixtral")
    for module in stacks(model):
        state = module.parametrizations["down_proj"][0].quant_state
        with torch.inference_mode():
            state.absmax = state.absmax.clone()
            if what == "all":
                module.parametrizations["down_proj"].original.data = module.parametrizations[
                    "down_proj"
                ].original.clone()
    near(step(converted(model))[1], step(plain)[1])

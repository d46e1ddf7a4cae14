"""PEFT's `target_parameters` on experts: each expert's rows get A and B of their own, and no stack of weights is
merged."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptfused
from ckptfused.compat.peft import PARAM_WRAPPER
from ckptfused.layer.source import class_name
from ckptfused.models.experts.install import AdaptedForward
from tests.models.test_experts import IMPLEMENTATIONS, MODELS, assert_alike, build, step

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
BOTH = ("gate_up_proj", "down_proj")


def adapted(name: str = "qwen3-moe", implementation: str = "eager", parameters: tuple[str, ...] = BOTH) -> Any:
    """A small mixture with adapters on its experts and, in its attention, on q, whose embeddings are trained."""
    model = build(name, implementation)
    target = "q_proj" if any(part.endswith(".q_proj") for part, _ in model.named_modules()) else "q_a_proj"
    config = peft.LoraConfig(
        r=3, lora_alpha=4, init_lora_weights=False, target_modules=[target],
        target_parameters=[f"experts.{parameter}" for parameter in parameters],
    )  # fmt: skip
    made = peft.get_peft_model(model, config).train()
    made.get_input_embeddings().weight.requires_grad_()  # something is trained without adapters, too
    return made


def wrappers(model: nn.Module) -> list[Any]:
    """The outermost of PEFT's wrappers around each module of experts."""
    found: list[Any] = [m for m in model.modules() if class_name(type(m)) == PARAM_WRAPPER]
    inner = [m.base_layer for m in found]
    return [m for m in found if m not in inner]


def is_ours(wrapper: nn.Module) -> bool:
    return isinstance(vars(wrapper).get("forward"), AdaptedForward)


@pytest.fixture
def merges(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parameters that PEFT merges its adapters into, as it does."""
    from peft.tuners.lora.layer import ParamWrapper

    seen: list[str] = []
    own = ParamWrapper._activate_lora

    def noted(self: Any, active: Any) -> Any:
        seen.append(self.parameter_name)
        return own(self, active)

    monkeypatch.setattr(ParamWrapper, "_activate_lora", noted)
    return seen


def alike(model: Any, converted: Any) -> None:
    """Whether both have one loss, and gradients that are one but for the order of sums."""
    (made, grads), (expected, wanted) = step(converted), step(model)
    torch.testing.assert_close(made.loss, expected.loss)
    assert_alike(grads, wanted)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_peft_and_nothing_is_merged(name: str, implementation: str, merges: list[str]) -> None:
    model = adapted(name, implementation)
    converted = copy.deepcopy(model)
    ckptfused.convert(converted)
    assert wrappers(converted) and all(map(is_ours, wrappers(converted)))
    merges.clear()  # convert tried it on small weights
    step(converted)
    assert not merges
    alike(model, converted)


@pytest.mark.parametrize("name", ["mixtral", "olmoe", "glm4-moe", "granite-moe"])
def test_the_attention_half_stays_fused(name: str) -> None:
    """Whether a layer's class was read or derived: our forward on PEFT's wrapper is nobody's patch."""
    plain, model = adapted(name), adapted(name)
    report = ckptfused.convert(model)
    assert {layer.path for layer in report.layers} <= {"part", "fused"}, str(report)
    calls: list[int] = []
    for wrapper in wrappers(model):
        wrapper.register_forward_hook(lambda *call: calls.append(1))
    alike(plain, model)
    assert len(calls) == len(wrappers(model))


@pytest.mark.parametrize("parameters", [("gate_up_proj",), ("down_proj",), ("down_proj", "gate_up_proj")])
def test_adapters_on_one_weight_and_in_the_other_order(parameters: tuple[str, ...], merges: list[str]) -> None:
    model = adapted(parameters=parameters)
    converted = copy.deepcopy(model)
    ckptfused.convert(converted)
    merges.clear()
    step(converted)
    assert not merges
    alike(model, converted)


def _second(model: Any) -> None:
    torch.manual_seed(1)
    model.add_adapter("other", peft.LoraConfig(
        r=2, init_lora_weights=False, target_modules=["q_proj"], target_parameters=[f"experts.{p}" for p in BOTH]
    ))  # fmt: skip
    model.base_model.set_adapter(["default", "other"])


def _off(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "_disable_adapters"):
            module._disable_adapters = True


def _hooked(model: Any) -> None:
    wrappers(model)[0].base_layer.register_forward_hook(lambda *_: None)


def _merged(model: Any) -> None:
    model.merge_adapter()


@pytest.mark.parametrize("change", [_second, _off, _hooked, _merged])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_what_the_op_does_not_add_peft_does(change: Callable[[Any], None], before: bool) -> None:
    """Before `convert`, which then says so, or after it."""
    model = adapted()
    converted = copy.deepcopy(model)
    change(model)
    if before:
        change(converted)
    report = ckptfused.convert(converted)
    assert before == any("PEFT merges its adapters" in note for note in report.notes)
    if not before:
        change(converted)
    if any(p.requires_grad for p in model.parameters()):
        alike(model, converted)


def test_a_hook_on_the_outer_wrapper_sees_what_it_is_given() -> None:
    model = adapted()
    ckptfused.convert(model)
    seen: list[int] = []
    for wrapper in wrappers(model):
        wrapper.register_forward_hook(lambda module, args, result: seen.append(len(args)))
    step(model)
    assert seen == [3, 3]


def test_adapters_in_float32_beside_weights_in_bfloat16() -> None:
    """Against float64: no further off than PEFT, which rounds the merged weights."""
    truth = adapted()
    half = copy.deepcopy(truth)
    for name, p in half.named_parameters():
        p.data = p.data.to(torch.float32 if "lora" in name else torch.bfloat16)
    for (_, p), (_, q) in zip(half.named_parameters(), truth.named_parameters(), strict=True):
        q.data = p.data.double()
    converted = copy.deepcopy(half)
    ckptfused.convert(converted)
    (_, wanted), (_, theirs), (_, ours) = step(truth), step(half), step(converted)
    names = [name for name in wanted if "experts" in name]
    assert all(ours[name].dtype == torch.float32 for name in names)

    def error(grads: dict[str, Tensor]) -> float:
        return sum(float((grads[name].double() - wanted[name]).square().sum()) for name in names)

    assert error(ours) <= 1.5 * error(theirs)


def test_bits_are_equal_for_every_keep() -> None:
    model = adapted()
    found = []
    for keep in ("inputs", "all"):
        converted = copy.deepcopy(model)
        ckptfused.convert(converted, keep=keep)
        found.append(step(converted)[1])
    assert all(torch.equal(a, found[1][name]) for name, a in found[0].items())


def test_no_stack_of_weights_is_saved() -> None:
    model = adapted()
    converted = copy.deepcopy(model)
    ckptfused.convert(converted)
    stacks = {p.nbytes for name, p in model.named_parameters() if name.endswith(BOTH)}

    def saved(model: Any) -> set[int]:
        """Sizes of the storages that backward holds, parameters' aside."""
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        seen = set()

        def pack(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            if storage.data_ptr() not in own:
                seen.add(storage.nbytes())
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            step(model)
        return seen

    assert stacks <= saved(model)
    assert not stacks & saved(converted)


def test_it_is_reverted_copied_and_pickled_and_merged_for_good() -> None:
    model = adapted()
    converted = copy.deepcopy(model)
    ckptfused.convert(converted)
    for other in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        assert all(is_ours(w) and vars(w)["forward"].wrapper is w for w in wrappers(other))
        alike(model, other)
    assert ckptfused.convert(converted).notes == ckptfused.convert(converted).notes  # once more
    assert all(map(is_ours, wrappers(converted)))
    ckptfused.revert(converted)
    assert not any("forward" in vars(w) for w in wrappers(converted))
    alike(model, converted)
    ckptfused.convert(converted)
    whole, expected = converted.merge_and_unload(), model.merge_and_unload()
    ids = torch.arange(18).view(2, 9) % 50
    torch.testing.assert_close(whole(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_wrapper_that_adds_something_else_is_left_alone() -> None:
    from peft.tuners.lora.layer import ParamWrapper

    model = adapted()
    kept = ParamWrapper.get_delta_factors

    def other(self: Any, name: str) -> Any:
        lhs, rhs, scale = kept(self, name)
        return lhs, rhs, 2 * scale

    ParamWrapper.get_delta_factors = other
    try:
        converted = copy.deepcopy(model)
        report = ckptfused.convert(converted)
        assert any("PEFT adds something else than A and B" in note for note in report.notes)
        alike(model, converted)
    finally:
        ParamWrapper.get_delta_factors = kept


def test_hooks_on_all_modules_see_what_they_would() -> None:
    from torch.nn.modules.module import register_module_forward_hook

    model = adapted()
    converted = copy.deepcopy(model)
    ckptfused.convert(converted)

    def scaled(module: nn.Module, args: Any, result: Any) -> Any:
        return result * 3 if type(module).__name__.endswith("Qwen3MoeExperts") else None

    hook = register_module_forward_hook(scaled)
    try:
        alike(model, converted)
    finally:
        hook.remove()


def test_experts_may_be_called_by_keywords() -> None:
    model = adapted()
    ckptfused.convert(model)
    wrapper = wrappers(model)[0]
    x, ids, weights = torch.randn(5, 32), torch.tensor([[0, 1]] * 5), torch.rand(5, 2)
    expected = wrapper(x, ids, weights)
    torch.testing.assert_close(wrapper(x, top_k_index=ids, top_k_weights=weights), expected)

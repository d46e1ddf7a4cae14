"""Changes to a model before convert, after it, and after a step: nothing stale is used, nothing foreign replaced."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

pytest.importorskip("transformers")

import ckptfused
from tests.models.compare import close, run
from tests.models.small import llama, unfused
from tests.models.zoo import text_batch

FUSED: dict[str, Callable[[Any], Any]] = {}
OTHERWISE: dict[str, Callable[[Any], Any]] = {}


def fused(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A change after which all layers are fused."""
    FUSED[change.__name__] = change
    return change


def otherwise(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A change after which the first layer is not fused."""
    OTHERWISE[change.__name__] = change
    return change


def shifted(model: Any) -> dict[str, Any]:
    return {name: t + 0.01 for name, t in model.state_dict().items()}


class Scaled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 1.5


@fused
def parametrized_norm(model: Any) -> None:
    parametrize.register_parametrization(model.model.layers[0].input_layernorm, "weight", Scaled())


@fused
def loaded(model: Any) -> None:
    model.load_state_dict(shifted(model))


@fused
def loaded_by_assignment(model: Any) -> None:
    model.load_state_dict(shifted(model), assign=True)


@fused
def double(model: Any) -> None:
    model.double()


@fused
def new_parameter(model: Any) -> None:
    model.model.layers[0].self_attn.q_proj.bias = nn.Parameter(torch.ones(48))


@fused
def new_data(model: Any) -> None:
    norm = model.model.layers[0].post_attention_layernorm
    norm.weight.data = torch.full_like(norm.weight, 2.0)


@fused
def new_numbers(model: Any) -> None:
    model.model.layers[0].self_attn.scaling = 0.1
    model.model.layers[0].input_layernorm.variance_epsilon = 0.5


@fused
def copied_layers(model: Any) -> None:
    model.model.layers = nn.ModuleList(copy.deepcopy(layer) for layer in model.model.layers)


@fused
def swapped_layers(model: Any) -> None:
    first, second = model.model.layers
    model.model.layers[0], model.model.layers[1] = second, first


@fused
def new_projection(model: Any) -> None:
    model.model.layers[0].mlp.up_proj = nn.Linear(48, 88, bias=False)


@fused
def a_subclass_with_the_same_forward(model: Any) -> None:
    layer = model.model.layers[0]
    layer.__class__ = type("Other", (type(layer),), {})


@otherwise
def pruned(model: Any) -> None:
    prune.l1_unstructured(model.model.layers[0].self_attn.q_proj, "weight", 0.3)


@otherwise
def weight_norm(model: Any) -> None:
    parametrizations.weight_norm(model.model.layers[0].self_attn.q_proj)


@otherwise
def parametrized_projection(model: Any) -> None:
    parametrize.register_parametrization(model.model.layers[0].mlp.down_proj, "weight", Scaled())


@otherwise
def a_subclass_with_another_forward(model: Any) -> None:
    class Louder(type(model.model.layers[0])):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs) * 1.25

    model.model.layers[0].__class__ = Louder


@otherwise
def another_attention(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    forward = type(attention).forward

    def louder(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)[0] * 1.1, None

    attention.forward = types.MethodType(louder, attention)


@otherwise
def another_linear(model: Any) -> None:
    class Double(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model.model.layers[0].mlp.up_proj.__class__ = Double


@otherwise
def another_activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.Identity()


@otherwise
def fewer_heads(model: Any) -> None:
    """Structured pruning leaves such heads: Hugging Face counts heads in the weights."""
    attention = model.model.layers[0].self_attn
    for name, width in (("q_proj", 24), ("k_proj", 12), ("v_proj", 12)):
        setattr(attention, name, nn.Linear(48, width, bias=False))
    attention.o_proj = nn.Linear(24, 48, bias=False)


@otherwise
def an_ffn_of_another_make(model: Any) -> None:
    model.model.layers[0].mlp = nn.Sequential(nn.Linear(48, 60), nn.Tanh(), nn.Linear(60, 48))


@otherwise
def an_attention_in_a_wrapper(model: Any) -> None:
    """PEFT's adaption prompt does this."""

    class Wrapper(nn.Module):
        def __init__(self, attention: nn.Module) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, **kwargs: Any) -> Any:
            return self.attention(**kwargs)[0] * 1.1, None

    model.model.layers[0].self_attn = Wrapper(model.model.layers[0].self_attn)


@otherwise
def a_hook_inside(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda _, args, y: y * 2)


@otherwise
def a_backward_hook_inside(model: Any) -> None:
    model.model.layers[0].mlp.register_full_backward_hook(lambda _, grads, outs: tuple(g * 2 for g in grads))


@otherwise
def a_patch_around_the_class(model: Any) -> None:
    """Liger and hub kernels do this."""
    mlp = model.model.layers[0].mlp
    mlp.__class__ = type("LigerMLP", (type(mlp),), {"forward": lambda self, x: self.down_proj(self.up_proj(x))})


def drawn(change: Callable[[Any], Any], model: Any) -> None:
    torch.manual_seed(11)
    change(model)


@pytest.mark.parametrize("when", ["before", "after", "after a step"])
@pytest.mark.parametrize("name", [*FUSED, *OTHERWISE])
def test_changes(name: str, when: str, underived: None) -> None:
    change = {**FUSED, **OTHERWISE}[name]
    plain, model = llama(), llama()
    if when == "before":
        drawn(change, model)
    report = ckptfused.convert(model)
    if when == "before":
        assert [layer.path for layer in report.layers] == ["fused" if name in FUSED else "generic", "fused"]
    if when == "after a step":
        run(model, text_batch())
    if when != "before":
        drawn(change, model)
    drawn(change, plain)
    if name == "new_projection":
        model.load_state_dict(plain.state_dict())
    with unfused() as reasons:
        got = run(model, text_batch())
    assert len(reasons) == (name in OTHERWISE)
    close(got, run(plain, text_batch()), 1e-5)


def test_a_forward_put_there_after_convert_runs() -> None:
    plain, model = llama(), llama()
    ckptfused.convert(model)
    for one in (plain, model):
        layer = one.model.layers[0]
        forward = layer.forward
        layer.forward = lambda *args, forward=forward, **kwargs: forward(*args, **kwargs) * 1.1
    with unfused() as reasons:
        close(run(model, text_batch()), run(plain, text_batch()), 1e-5)
    assert not reasons
    assert ckptfused.convert(model).fused == 1
    close(run(model, text_batch()), run(plain, text_batch()), 1e-5)
    assert ckptfused.convert(model, "mid").fused == 1  # a second time, the patch is still there
    close(run(model, text_batch()), run(plain, text_batch()), 1e-5)


def test_a_refused_convert_changes_nothing() -> None:
    model = llama()
    with pytest.raises(ValueError, match="keep"):
        ckptfused.convert(model, "everything")
    with pytest.raises(TypeError, match="nn.Module"):
        ckptfused.convert(model.state_dict())
    assert not any("forward" in vars(module) for module in model.modules())


def test_what_is_kept_is_changed_by_a_second_convert() -> None:
    plain, model = llama(), llama()
    ckptfused.convert(model)
    for keep in ("all", ("attn", "mid"), "inputs"):
        report = ckptfused.convert(model, keep)
        assert report.fused == 2
        close(run(model, text_batch()), run(plain, text_batch()), 1e-5)
    assert ckptfused.revert(model) == 2
    assert not any("forward" in vars(module) for module in model.modules())

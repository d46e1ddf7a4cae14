"""What autograd can be asked of a model, asked of a converted one."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

pytest.importorskip("transformers")

import ckptfused
from tests.accounting import CountOps
from tests.models.compare import close, gradients, no_worse, run
from tests.models.small import llama, twins, unfused
from tests.models.test_families import DRAWS
from tests.models.zoo import text_batch

pytestmark = pytest.mark.each_torch


def embedded(model: Any) -> dict[str, Any]:
    """A batch that starts from embeddings, which are a leaf."""
    batch: dict[str, Any] = text_batch()
    batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids")).detach().requires_grad_()
    return batch


def compare(step: Callable[[Any], dict[str, Tensor]], p: float = 0.0, relative: float = 1e-5, **options: Any) -> None:
    plain, model = twins(p=p, **options)
    with unfused() as reasons:
        got = step(model)
    assert not reasons
    close(got, step(plain), relative)


def test_grad_of_an_input_and_a_weight() -> None:
    def step(model: Any) -> dict[str, Tensor]:
        batch = embedded(model)
        wanted = [batch["inputs_embeds"], model.model.layers[0].self_attn.k_proj.weight]
        found = torch.autograd.grad(model(**batch).loss, wanted)
        assert all(p.grad is None for p in model.parameters())
        return dict(zip(("x", "k"), found, strict=True))

    compare(step)


def test_hooks_change_gradients() -> None:
    """Backward hooks on a layer, on its input and output tensors, and on a weight."""

    def step(model: Any) -> dict[str, Tensor]:
        first, second = model.model.layers
        first.register_full_backward_hook(lambda _, grad_in, grad_out: tuple(g * 2 for g in grad_in))
        second.register_full_backward_pre_hook(lambda _, grad_out: tuple(g * 3 for g in grad_out))
        second.register_forward_pre_hook(lambda _, args: args[0].register_hook(lambda g: g + 1) and None)
        first.register_forward_hook(lambda _, args, y: y.register_hook(lambda g: g * 0.5) and None)
        first.mlp.up_proj.weight.register_hook(lambda g: g * 7)
        return run(model, text_batch())

    compare(step)


def test_a_layer_that_runs_twice() -> None:
    def step(model: Any) -> dict[str, Tensor]:
        model.model.layers[1] = model.model.layers[0]
        return run(model, {**text_batch(), "use_cache": False})

    compare(step)


def test_a_layer_shared_before_convert_is_found_once() -> None:
    model = llama(num_hidden_layers=3)
    model.model.layers[2] = model.model.layers[0]
    plain = copy.deepcopy(model)
    assert [layer.name for layer in ckptfused.convert(model).layers] == ["model.layers.0", "model.layers.1"]
    batch = {**text_batch(), "use_cache": False}
    close(run(model, batch), run(plain, batch), 1e-5)
    assert ckptfused.revert(model) == 2


@pytest.mark.parametrize("same", ["k and v", "two layers", "embedding and head"])
def test_tied_weights(same: str) -> None:
    def step(model: Any) -> dict[str, Tensor]:
        first, second = (layer.self_attn for layer in model.model.layers)
        if same == "k and v":
            first.k_proj.weight = first.v_proj.weight
        elif same == "two layers":
            second.q_proj.weight = first.q_proj.weight
        else:
            model.lm_head.weight = model.model.embed_tokens.weight
        return run(model, text_batch())

    compare(step)


def test_an_output_changed_in_place_afterwards() -> None:
    def step(model: Any) -> dict[str, Tensor]:
        for layer in model.model.layers:
            layer.register_forward_hook(lambda _, args, y: y.mul_(1.5).add_(0.25))
        return run(model, text_batch())

    compare(step)


@pytest.mark.parametrize("trained", ["one weight", "second layer", "norms", "head", "nothing"])
def test_frozen_weights(trained: str) -> None:
    def wanted(name: str) -> bool:
        return {
            "one weight": name == "model.layers.0.self_attn.v_proj.weight",
            "second layer": "layers.1" in name,
            "norms": "layernorm" in name,
            "head": "lm_head" in name,
            "nothing": False,
        }[trained]

    def step(model: Any) -> dict[str, Tensor]:
        for name, p in model.named_parameters():
            p.requires_grad_(wanted(name))
        if trained != "nothing":
            return run(model, text_batch())
        out = model(**text_batch())
        assert not out.loss.requires_grad
        return {"loss": out.loss}

    compare(step)
    if trained == "head":
        _, model = twins()
        with CountOps() as ops:
            step(model)
        assert ops.blocks == (2, 0)


def test_no_grad_and_inference_mode() -> None:
    plain, model = twins()
    batch = {**text_batch(), "use_cache": False}
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), unfused() as reasons:
            close({"logits": model(**batch).logits}, {"logits": plain(**batch).logits}, 1e-5)
        assert not reasons


def penalty(model: Any) -> dict[str, Tensor]:
    """A gradient penalty on the input and on a weight."""
    model.zero_grad()
    batch = embedded(model)
    loss = model(**batch).loss
    wanted = [batch["inputs_embeds"], model.model.layers[0].mlp.gate_proj.weight]
    first = torch.autograd.grad(loss, wanted, create_graph=True)
    (loss + sum(g.square().sum() for g in first)).backward()
    return {"x": first[0].detach(), "gate": first[1].detach(), **gradients(model)}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_second_derivatives(implementation: str) -> None:
    plain, model = twins(implementation)
    with unfused() as reasons:
        got = penalty(model)
    assert not reasons
    with sdpa_kernel(SDPBackend.MATH):  # the other kernels of SDPA are differentiated once
        want = penalty(plain)
        close(got, want, 1e-5)
        with ckptfused.original(model), unfused() as reasons:
            assert all(torch.equal(g, want[name]) for name, g in penalty(model).items())
        assert len(reasons) == 2
    with unfused() as reasons:
        close(run(model, text_batch()), run(plain, text_batch()), 1e-5)
    assert not reasons


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("where", ["offloaded", "checkpointed"])
def test_second_derivatives_where_saved_tensors_are_packed(where: str) -> None:
    plain, model = twins("eager")
    want = penalty(plain)
    if where == "checkpointed":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with torch.autograd.graph.save_on_cpu() if where == "offloaded" else contextlib.nullcontext(), unfused() as reasons:
        close(penalty(model), want, 1e-5)
    assert not reasons


def test_second_derivatives_after_a_first_backward() -> None:
    plain, model = twins("eager")
    found = []
    for one in (plain, model):
        batch = embedded(one)
        loss = one(**batch).loss
        loss.backward(retain_graph=True)
        (first,) = torch.autograd.grad(loss, batch["inputs_embeds"], create_graph=True)
        first.square().sum().backward()
        found.append(gradients(one))
    close(found[1], found[0], 1e-5)


def test_second_derivatives_of_tied_weights_and_a_hessian_product() -> None:
    plain, model = twins("eager")
    for one in (plain, model):
        one.model.layers[0].self_attn.k_proj.weight = one.model.layers[0].self_attn.v_proj.weight
    close(penalty(model), penalty(plain), 1e-5)
    x = torch.randn(2, 5, 48)
    tables = plain.model.rotary_emb(x, torch.arange(5)[None])
    mask = torch.full((5, 5), float("-inf")).triu(1)[None, None]
    found = []
    for one in (model, plain):
        layer = one.model.layers[0]
        loss = lambda x, layer=layer: layer(x, mask, position_embeddings=tables).square().sum()  # noqa: E731
        found.append(dict(enumerate(torch.autograd.functional.hvp(loss, x, x))))
    close(*found, 1e-5)  # type: ignore[misc]


def test_second_derivatives_under_autocast() -> None:
    """Against float32, no worse than twice the unconverted model."""
    draws: list[Any] = []
    for seed in range(DRAWS):
        plain, model = twins("eager", seed=seed)
        truth = penalty(plain)
        with torch.autocast("cpu", torch.bfloat16):
            draws.append((penalty(model), penalty(plain), truth))
    no_worse(draws, torch.bfloat16)


def test_second_derivatives_with_dropout() -> None:
    """The masks are those that the forward drew: against finite differences of a function that draws them at every
    call.
    """
    model = llama(p=0.25).double()
    ckptfused.convert(model)
    layer = model.model.layers[0]
    tables = model.model.rotary_emb(torch.zeros(1, 3, 48, dtype=torch.float64), torch.arange(3)[None])

    later = itertools.count(2)

    def drawn_alike(x: Tensor) -> Tensor:
        torch.manual_seed(1)
        y: Tensor = layer(x, position_embeddings=tables)
        torch.manual_seed(next(later))  # a backward that draws from the generator as it finds it draws anew each time
        return y

    x = torch.randn(1, 3, 48, dtype=torch.float64, requires_grad=True)
    with unfused() as reasons:
        assert torch.autograd.gradgradcheck(drawn_alike, x, fast_mode=True)
    assert not reasons


def test_create_graph_with_dropout_changes_no_gradient_and_no_later_draw() -> None:
    plain, model = twins("eager", p=0.25)
    found = []
    for graph in (False, True):
        batch = embedded(model)
        torch.manual_seed(1)
        (first,) = torch.autograd.grad(model(**batch).loss, batch["inputs_embeds"], create_graph=graph)
        found.append((first.detach(), torch.rand(4)))
    # The second gradient is computed again, by plain operations.
    close({"x": found[1][0]}, {"x": found[0][0]}, 1e-5)
    assert torch.equal(found[0][1], found[1][1])
    torch.manual_seed(2)
    with ckptfused.original(model):
        got = penalty(model)
    torch.manual_seed(2)
    want = penalty(plain)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_backward_lets_go_of_the_input() -> None:
    """What second derivatives would need is not kept past a backward that does not ask for them."""
    _, model = twins()
    layer = model.model.layers[0]
    x = torch.randn(1, 5, 48)
    tables = model.model.rotary_emb(x, torch.arange(5)[None])
    hidden = x * 1.0
    reference = weakref.ref(hidden)
    y = layer(hidden, position_embeddings=tables)
    del hidden
    gc.collect()
    assert reference() is not None
    y.sum().backward()
    assert reference() is None
    del y


def test_original_is_nested_and_survives_errors() -> None:
    _, model = twins()
    with contextlib.suppress(KeyError), ckptfused.original(model):
        with ckptfused.original(model.model.layers[0]):
            pass
        with unfused() as reasons:
            run(model, text_batch())
        assert len(reasons) == 2
        raise KeyError
    with unfused() as reasons:
        run(model, text_batch())
    assert not reasons


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp", "jacrev"])
def test_transforms_take_the_original_path(transform: str) -> None:
    plain, model = twins("eager")
    x = torch.randn(2, 5, 48)
    tables = plain.model.rotary_emb(x, torch.arange(5)[None])
    mask = torch.full((5, 5), float("-inf")).triu(1)[None, None]

    def result(one: Any) -> Any:
        loss = lambda x: one.model.layers[0](x, mask, position_embeddings=tables).square().sum()  # noqa: E731
        if transform == "jvp":
            return torch.func.jvp(loss, (x,), (x,))[1]
        return torch.vmap(loss)(x[None]) if transform == "vmap" else getattr(torch.func, transform)(loss)(x)

    assert torch.equal(result(model), result(plain))

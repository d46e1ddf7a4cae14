"""torch.compile of a whole converted model, in every order."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import ckptfused
from tests.accounting import saved_bytes
from tests.models import zoo_decoders, zoo_encoders, zoo_llama, zoo_seq2seq  # noqa: F401
from tests.models.compare import all_close, close, run, train
from tests.models.small import llama, twins, unfused
from tests.models.zoo import VOCABULARY, ZOO, randomize, text_batch

pytestmark = pytest.mark.each_torch


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(model: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
    return {name.replace("_orig_mod.", ""): t for name, t in run(model, batch).items()}


def batch(length: int = 19) -> dict[str, Any]:
    return {**text_batch(length=length), "use_cache": False}


INDUCTOR = pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.extended])
"""What it makes of a graph that AOTAutograd has made: `make test` asks it for a block, in tests/properties."""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_no_graph_breaks_and_right_gradients(backend: str) -> None:
    """In each of a few steps of training."""
    plain, model = twins()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    want = train(plain, lambda one: run(one, batch()))
    all_close(train(compiled, lambda one: step(one, batch())), want, 1e-5)


@pytest.mark.slow
def test_caches_and_masks() -> None:
    """What Hugging Face does at each call is traced too: the cache that stays empty, no mask, a mask of one's own."""
    plain, model = twins(num_hidden_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    own = (torch.rand(3, 1, 19, 19) > 0.5) | torch.eye(19).bool()
    for change in ({"use_cache": True}, {"attention_mask": None}, {"attention_mask": own}):
        close(step(compiled, batch() | change), run(plain, batch() | change), 1e-5)


@pytest.mark.slow
def test_it_saves_only_the_inputs_of_the_layers() -> None:
    """At run time a compiled model saves what it saves without converted layers, and x of each of them."""
    found = {}
    tokens, width = 3 * 19, 48
    for count in (1, 2):
        _, model = twins(num_hidden_layers=count)
        compiled = torch.compile(model.model, fullgraph=True, backend="aot_eager")
        x = torch.randn(3, 19, width)
        call = lambda compiled=compiled, x=x: compiled(inputs_embeds=x, use_cache=False).last_hidden_state  # noqa: E731
        call()  # compiles
        found[count] = saved_bytes(call, model, own=[x])
    assert found[2] - found[1] == tokens * width * 4


def adapted(base: Any, targets: tuple[str, ...] = ("q_proj", "o_proj", "down_proj"), p: float = 0.0) -> Any:
    """A model with LoRA beside a frozen base."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_dropout=p, target_modules=list(targets), init_lora_weights=False)
    return peft.get_peft_model(base, config).train()


adapting = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.mark.slow
@adapting
@pytest.mark.parametrize(
    ("first", "backend"),
    [
        pytest.param(True, "aot_eager", id="convert-adapt-aot_eager"),
        pytest.param(False, "aot_eager", id="adapt-convert-aot_eager"),
        pytest.param(False, *INDUCTOR.values, id="adapt-convert-inductor", marks=INDUCTOR.marks),
        pytest.param(True, *INDUCTOR.values, id="convert-adapt-inductor", marks=INDUCTOR.marks),
    ],
)
def test_adapters(first: bool, backend: str) -> None:
    sizes: Any = {"num_hidden_layers": 1}
    plain, model = twins(**sizes) if first else (llama(**sizes), llama(**sizes))
    plain, model = adapted(plain), adapted(model)
    assert first or ckptfused.convert(model).fused == 1
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    want = run(plain, batch())
    assert all("lora" in name for name in want if name != "loss")
    close(step(compiled, batch()), want, 1e-5)


@pytest.mark.slow
@adapting
@pytest.mark.parametrize("p", [pytest.param(0.0, marks=pytest.mark.extended), 0.3])
def test_adapters_add_nothing_to_what_is_saved(p: float) -> None:
    found = {}
    tokens, width = 3 * 19, 48
    for count in (1, 2):
        model = adapted(twins(num_hidden_layers=count)[1], p=p)
        inner = model.get_base_model().model
        compiled = torch.compile(inner, fullgraph=True, backend="aot_eager")
        x = torch.randn(3, 19, width)
        call = lambda compiled=compiled, x=x: compiled(inputs_embeds=x, use_cache=False).last_hidden_state  # noqa: E731
        call()  # compiles
        found[count] = saved_bytes(call, model, own=[x])
    assert found[2] - found[1] == tokens * width * 4 + (16 if p else 0)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [pytest.param(True, marks=pytest.mark.extended), None])
def test_dynamic_shapes(dynamic: bool | None) -> None:
    plain, model = twins(num_hidden_layers=1)
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (19, 14, 33):
        close(step(compiled, batch(length)), run(plain, batch(length)), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend",
    ["aot_eager", INDUCTOR],
)
def test_dropout_draws_anew_and_as_in_eager(backend: str) -> None:
    _, model = twins(p=0.3)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    results = []
    for one in (compiled, model):
        torch.manual_seed(5)
        results.append([step(one, batch()) for _ in range(2)])
    (first, second), (eager_first, eager_second) = results
    assert first["loss"] != second["loss"]
    close(first, eager_first, 1e-5)
    close(second, eager_second, 1e-5)


@pytest.mark.slow
def test_a_change_of_dropout_or_mode_is_seen() -> None:
    plain, model = twins(num_hidden_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    want = run(plain, batch())
    close(step(compiled, batch()), want, 1e-5)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.9
    assert abs(step(compiled, batch())["loss"] - want["loss"]) > 1e-3
    model.eval()
    close(step(compiled, batch()), want, 1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch looks, compiling
@pytest.mark.parametrize("how", ["function", "model.compile", "layer.compile"])
def test_compile_then_convert_then_revert(how: str) -> None:
    """A graph made before is not run after."""
    plain, model = llama(num_hidden_layers=1), llama(num_hidden_layers=1)
    compiled: nn.Module = model
    if how == "function":
        compiled = torch.compile(model, backend="eager")
    elif how == "model.compile":
        model.compile(backend="eager")
    else:
        for layer in model.model.layers:
            layer.compile(backend="eager")
    want = run(plain, batch())
    close(step(compiled, batch()), want, 1e-5)
    before = saved_bytes(lambda: compiled(**batch()).loss, model)
    assert ckptfused.convert(compiled).fused == 1
    close(step(compiled, batch()), want, 1e-5)
    assert saved_bytes(lambda: compiled(**batch()).loss, model) < 0.8 * before
    assert ckptfused.revert(compiled) == 1
    close(step(compiled, batch()), want, 1e-5)
    assert saved_bytes(lambda: compiled(**batch()).loss, model) == before


@pytest.mark.slow
def test_a_patch_after_compiling_is_seen() -> None:
    plain, model = twins()
    compiled = torch.compile(model, backend="eager")
    step(compiled, batch())
    for one in (plain, model):
        one.model.layers[0].mlp.down_proj.register_forward_hook(lambda *args: args[-1] * 2)
        one.model.layers[1].self_attn.scaling = 0.1
        one.model.layers[1].input_layernorm.variance_epsilon = 0.3
    close(step(compiled, batch()), run(plain, batch()), 1e-5)


@pytest.mark.slow
def test_a_generic_layer_compiles() -> None:
    plain, model = twins()
    for one in (plain, model):
        one.model.layers[0].mlp.act_fn = nn.Tanh()
    with unfused() as reasons:
        close(run(model, batch()), run(plain, batch()), 1e-5)
    assert len(reasons) == 1
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    close(step(compiled, batch()), run(plain, batch()), 1e-5)


# One model an adapter but for mixtures of experts: Hugging Face's own hook in these stops Dynamo without convert, too.
ALONE = ["llama", "gemma2", "gpt2", "bert", "t5"]
LIKE_THEM = ["phi3", "opt", "vit", "whisper", "mistral-window", "qwen3", "gemma3", "neox"]
HOOKED: list[Any] = [(name, "register_forward_hook") for name in ALONE] + [("llama", "register_forward_pre_hook")]
HOOKED += [pytest.param(name, "register_forward_hook", marks=pytest.mark.extended) for name in LIKE_THEM]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch looks, compiling
@pytest.mark.parametrize(("name", "hook"), HOOKED)
def test_a_layer_compiled_alone_with_a_hook(name: str, hook: str) -> None:
    """FSDP2 puts its hooks on each layer. They collect no outputs, which is what Hugging Face's hooks do."""
    specimen = ZOO[name]
    plain: Any = randomize(specimen.make(0.0, specimen.implementations[0])).train()
    model, seen = copy.deepcopy(plain), []
    ckptfused.convert(model)
    # Each layer is a compilation of its own; T5 has one class for encoder and decoder.
    kinds = {(type(layer), getattr(layer, "is_decoder", False)): layer for layer in specimen.layers(model)}
    for layer in kinds.values():
        layer.compile(fullgraph=True, backend="eager")
        getattr(layer, hook)(lambda *_: seen.append(torch.compiler.is_compiling()))
    with unfused() as reasons:
        got, want = run(model, specimen.batch()), run(plain, specimen.batch())
    parts = ({key: t for key, t in found.items() if not key.endswith(specimen.zero)} for found in (got, want))
    close(*parts, 1e-5)
    assert any(seen) and not reasons


@pytest.mark.slow
def test_copies_of_compiled_models() -> None:
    plain, model = twins(num_hidden_layers=1)
    compiled = torch.compile(model, backend="eager")
    step(compiled, batch())
    other = copy.deepcopy(model)
    with torch.no_grad():
        for one in (other, plain):
            for p in one.parameters():
                p.mul_(1.1)
    close(step(torch.compile(other, backend="eager"), batch()), run(plain, batch()), 1e-5)


@pytest.mark.slow
def test_generation_from_a_compiled_model() -> None:
    plain, model = twins(num_hidden_layers=1)
    ids = torch.randint(2, VOCABULARY, (2, 5))
    options: Any = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model.forward = torch.compile(model.forward, backend="eager")
    assert torch.equal(model.eval().generate(ids, **options), plain.eval().generate(ids, **options))

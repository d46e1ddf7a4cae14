"""Layers of transformers, without a word about any family: those that a block can compute are derived, others say at
which line they are not."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

import ckptfused  # noqa: E402
from ckptfused.layer.parts import Reason  # noqa: E402
from ckptfused.layer.spec_text import Mode  # noqa: E402
from ckptfused.models import find  # noqa: E402
from ckptfused.models.derive.derive import derive  # noqa: E402
from ckptfused.models.derive.family import DERIVED  # noqa: E402
from ckptfused.models.derive.prove import leaves_of, proved_call  # noqa: E402
from tests.cases import by_turns  # noqa: E402
from tests.models.compare import close  # noqa: E402
from tests.models.small import unfused  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
IN_ONE_HALF_OF_A_HEAD = {"hidden_size": 64, "head_dim": 16, "partial_rotary_factor": 0.5}
GPT = {"n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 64}
# Names of models, what their configurations say beside, and words of the text that is to be read.
FUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Llama", {}, "attn.rope=half ffn.act=swiglu"),
    ("Llama", {"attention_bias": True, "mlp_bias": True, "attention_dropout": 0.1}, "attn.p_attn=0.1"),
    ("Mistral", {"sliding_window": 5}, "attn.rope=half ffn.act=swiglu"),
    ("Qwen2", {}, "attn.pre=rmsnorm"),
    ("Qwen3", {}, "attn.qk_norm=rmsnorm"),
    ("Gemma", {}, "attn.pre=gemma ffn.act=geglu_tanh"),
    ("Gemma2", {"query_pre_attn_scalar": 12}, "attn.softcap=50.0 attn.post=gemma ffn.post=gemma"),
    ("Gemma3", {"query_pre_attn_scalar": 12}, "attn.qk_norm=gemma attn.post=gemma"),
    ("Olmo", {}, "attn.pre=layernorm ffn.act=swiglu"),
    ("Granite", {"residual_multiplier": 0.3, "attention_multiplier": 0.2}, "attn.m=0.3 ffn.m=0.3 attn.scale=0.2"),
    ("SmolLM3", {}, "attn.rope=half"),
    ("Glm", IN_ONE_HALF_OF_A_HEAD, "attn.rope=interleaved attn.rotary_dim=8 ffn.joint=1"),
    ("Glm4", IN_ONE_HALF_OF_A_HEAD, "attn.rope=interleaved attn.rotary_dim=8 attn.post=rmsnorm ffn.post=rmsnorm"),
    ("StableLm", IN_ONE_HALF_OF_A_HEAD, "attn.rotary_dim=8 ffn.act=swiglu"),
    ("Starcoder2", {}, "attn.pre=layernorm ffn.act=gelu_tanh"),
    ("Phi", {}, "parallel=shared attn.rotary_dim=6 ffn.act=gelu_tanh"),
    ("Phi3", {}, "attn.joint=1 ffn.joint=1"),
    ("GPTNeoX", {}, "parallel=1 attn.interleaved=1 attn.rotary_dim=4"),
    ("GPTNeoX", {"use_parallel_residual": False}, "attn.interleaved=1 ffn.pre=layernorm"),
    ("Cohere", {}, "parallel=shared attn.rope=interleaved"),
    ("Cohere2", {}, "parallel=shared attn.rope=interleaved"),
    ("Helium", {}, "attn.rope=interleaved"),
    ("Exaone4", {}, "attn.post=rmsnorm attn.qk_norm=rmsnorm"),
    ("Arcee", {}, "ffn.act=relu2"),
    ("SeedOss", {}, "attn.p_res=0.1"),
    ("Persimmon", {}, "attn.interleaved=1 attn.qk_norm=layernorm ffn.act=relu2"),
    ("OPT", {"ffn_dim": 88, "word_embed_proj_dim": 48}, "ffn.act=relu attn.p_res=0.1"),
    ("GPT2", GPT, "attn.transposed=1 ffn.act=gelu_tanh"),
    ("Bert", {}, "attn.out=layernorm ffn.out=layernorm"),
    ("Olmo2", {}, "attn.post=rmsnorm ffn.post=rmsnorm attn.qk_norm=rmsnorm attn.qk_place=row"),
    ("Olmo3", {}, "attn.qk_place=row"),
    ("HrmText", {}, "attn.output_gate=entry"),
    ("HunYuanDenseV1", {}, "attn.qk_norm=rmsnorm attn.qk_place=turned"),
    ("NanoChat", {}, "attn.qk_norm=rmsnorm attn.qk_place=turned ffn.act=relu2"),
    ("Nemotron", {}, "attn.pre=layernorm1p ffn.act=relu2"),
    ("Apertus", {}, "attn.qk_norm=rmsnorm ffn.act=xielu"),
    ("GPTJ", {**GPT, "rotary_dim": 8}, "parallel=shared attn.rope=interleaved attn.rotary_dim=8"),
    ("Falcon", {}, "parallel=shared attn.joint=1 attn.kv_heads=1"),
    ("Mpt", {"d_model": 48, "n_heads": 4, "n_layers": 2}, "attn.mask=add"),
    ("GPTNeo", {"num_heads": 4, "num_layers": 2, "attention_types": [[["global", "local"], 1]]}, "attn.causal=1"),
    ("RoFormer", {}, "attn.rope=interleaved attn.out=layernorm"),
    ("GPTNeoXJapanese", {}, "attn.joint=1 attn.interleaved=1"),
    ("HyperCLOVAX", {}, "attn.pre=rmsnorm"),
    ("GraniteSWA", {"attention_dropout": 0.1}, "attn.sinks=1"),
    ("Ministral3", {}, "attn.q_scale=1 attn.rope=half"),
    ("Flint", {"num_experts": 4}, "attn.sinks=1"),
]
GENERIC = [
    ("CodeGen", "modeling_codegen.py", "no rule takes add"),
    ("DebertaV2", "modeling_deberta_v2.py", "a rotary table of shape []"),
]
ROUTED = {"moe_intermediate_size": 40, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 12}
# Of these one half, and why the other one is not.
HALVES: list[tuple[str, dict[str, Any], str, str]] = [
    ("Mixtral", {"num_local_experts": 4}, "attn.rope=half", "nonzero"),
    ("Qwen2Moe", {"num_experts": 4, **ROUTED, "decoder_sparse_step": 1}, "attn.rope=half", "nonzero"),
    ("Qwen3Moe", {"num_experts": 4, **ROUTED, "attention_dropout": 0.1}, "attn.qk_norm=rmsnorm", "nonzero"),
    ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}, "attn.qk_place=row", "nonzero"),
    ("GraniteMoe", {"num_local_experts": 4, "residual_multiplier": 0.3}, "attn.m=0.3", "nonzero"),
    ("Glm4Moe", {"n_routed_experts": 4, **ROUTED, "first_k_dense_replace": 0}, "attn.rope=half", "nonzero"),
    ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2}, "attn.sinks=1 attn.rope=half", "nonzero"),
    ("GraniteMoeSWA", {"num_local_experts": 4, "attention_dropout": 0.1}, "attn.sinks=1", "nonzero"),
    ("MiniCPM3", {**LATENT, "num_key_value_heads": 4}, "halves=ffn ffn.m=0.9899494936611664", "comes from no call"),
    ("DiffLlama", {}, "halves=ffn ffn.act=swiglu", "no rule takes rms_norm"),
    ("Bamba", {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_d_state": 8}, "halves=ffn", "mamba.norm.weight"),
]


def model_of(name: str, implementation: str, **options: Any) -> nn.Module:
    """A small model with random weights."""
    configured = f"{name}TextConfig" if name == "Gemma3" else f"{name}Config"
    if not hasattr(transformers, configured):
        pytest.skip("transformers has no such model")
    sizes = {key: value for key, value in SIZES.items() if (name, key) != ("Falcon", "head_dim")}  # which is a property
    config = getattr(transformers, configured)(**{**sizes, **options}, attn_implementation=implementation)
    torch.manual_seed(0)
    made = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    try:
        return getattr(transformers, made if hasattr(transformers, made) else f"{name}Model")(config)
    except ValueError as error:
        if implementation == "sdpa" and "does not support an attention implementation" in str(error):
            pytest.skip("transformers has no such model")
        raise


def called(model: nn.Module, tokens: int = 16) -> tuple[nn.Module, Any, Any]:
    """The first layer of a model, with what the model calls it with."""
    _, layer, _ = next(iter(find.layers(model)))
    calls: list[Any] = []
    hook = layer.register_forward_pre_hook(lambda _, a, k: calls.append((a, k)), with_kwargs=True)
    with torch.no_grad():
        model(torch.randint(1, 96, (2, tokens)), **({} if "Bert" in type(model).__name__ else {"use_cache": False}))
    hook.remove()
    return layer, *calls[0]


def agrees(layer: Any, args: Any, kwargs: Any) -> None:
    """In the layer's own type and shape: the op's result and gradients against the layer's own, in eval."""
    x: Tensor = leaves_of(args, kwargs)["arg:0"].detach().requires_grad_()
    given = (x, *args[1:])
    fused = DERIVED.run(layer, Mode(), given, kwargs)
    assert not isinstance(fused, Reason), fused
    own = type(layer).forward(layer, *given, **kwargs)
    own, fused = (y[0] if isinstance(y, tuple) else y for y in (own, fused))  # and attention weights, or a cache
    wanted = [x, *(p for p in layer.parameters() if p.requires_grad)]
    # Float32 on both sides, each with its own order of sums.
    torch.testing.assert_close(fused, own, rtol=1e-4, atol=1e-5)
    weights = torch.randn_like(own)
    pairs = zip(*(torch.autograd.grad(y, wanted, weights, allow_unused=True) for y in (own, fused)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("index", "implementation"),
    by_turns(range(len(FUSED)), ["sdpa", "eager"]),
    ids=lambda value: FUSED[value][0] if isinstance(value, int) else None,
)
def test_layers_are_derived(index: int, implementation: str) -> None:
    name, options, words = FUSED[index]
    if name == "Gemma2" and implementation == "sdpa":
        pytest.skip("transformers has no such model")
    layer, args, kwargs = called(model_of(name, implementation, **options))
    found = derive(layer.train(), args, kwargs)
    assert found.proof is not None, found.why
    text = found.proof.text
    assert set(words.split()) <= set(text.split()), text
    assert ("attn.causal=1" in text) != ("attn.mask=" in text) or name in ("Bert", "RoFormer", "GPTNeo")
    assert max(found.proof.errors.values()) < 1e-11
    layer.eval()
    found = derive(layer, args, kwargs)
    assert found.proof is not None and "p_" not in found.proof.text, found.why
    agrees(layer, args, kwargs)


@pytest.mark.parametrize("index", range(len(HALVES)), ids=[name for name, *_ in HALVES])
def test_a_half_is_derived_where_the_other_cannot_be(index: int) -> None:
    name, options, words, why = HALVES[index]
    model = model_of(name, "eager" if "sinks" in words else "sdpa", **options)
    model.set_experts_implementation("eager")  # type: ignore[operator]
    layer, args, kwargs = called(model)
    found = derive(layer.train(), args, kwargs)
    assert found.proof is not None and why in found.why, found.why
    assert {"halves=attn" if "halves" not in words else "", *words.split()} - {""} <= {*found.proof.text.split()}
    assert ("attn.p_attn=0.1" in found.proof.text) == ("attention_dropout" in options)
    assert max(found.proof.errors.values()) < 1e-11
    agrees(layer.eval(), args, kwargs)


def test_an_auxiliary_loss_is_that_of_the_model_as_it_was() -> None:
    """transformers' hooks collect the logits of routers, which are called once a forward."""
    routed = {"num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    plain: Any = model_of("Olmoe", "sdpa", **routed).double().train()
    plain.set_experts_implementation("eager")
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    counts = Counter[str]()
    for name, module in converted.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda *_, name=name: counts.update([name]))
    ids = torch.randint(1, 96, (2, 16))
    with unfused() as reasons:
        made = converted(ids, labels=ids, use_cache=False)
    want = plain(ids, labels=ids, use_cache=False)
    assert not reasons and counts.total() == len(counts) == 2
    assert float(want.aux_loss.detach()) > 0
    for model, loss in ((plain, want.loss), (converted, made.loss)):
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
    # Norms and routers have float32 inside, and the fused half has not.
    torch.testing.assert_close(made.aux_loss, want.aux_loss, rtol=1e-5, atol=0)
    gradients = [{n: p.grad for n, p in model.named_parameters()} for model in (converted, plain)]
    close(*gradients, 1e-4)


@pytest.mark.parametrize(("name", "file", "why"), GENERIC)
def test_others_say_where_they_do_not_fit(name: str, file: str, why: str) -> None:
    layer, args, kwargs = called(model_of(name, "eager", rotary_dim=8) if name == "CodeGen" else model_of(name, "sdpa"))
    found = derive(layer, args, kwargs)
    assert found.proof is None and found.call is not None
    assert file in found.call.place and why in found.why


def test_a_mask_is_the_callers_own() -> None:
    layer, args, kwargs = called(model_of("Llama", "eager"))
    found = derive(layer, args, kwargs)
    assert found.proof is not None, found.why
    leaves = leaves_of(args, kwargs)
    call = proved_call(found.layout, layer, leaves["arg:0"], leaves, Mode())
    assert not isinstance(call, Reason) and call.masks.mask is not None
    assert call.masks.mask.data_ptr() == kwargs["attention_mask"].data_ptr()


def test_a_bias_of_each_head_and_batch_element_is_derived() -> None:
    """BLOOM's is [B·H, 1, T], with keys that are hidden in another mask; its GELU has a constant of eight digits."""
    layer, args, kwargs = called(model_of("Bloom", "eager", n_head=4, n_layer=2).eval())
    found = derive(layer, args, kwargs)
    assert found.proof is not None, found.why
    assert {"attn.interleaved=1", "attn.mask=add", "ffn.act=gelu_tanh"} <= set(found.proof.text.split())
    agrees(layer, args, kwargs)


def test_tables_of_each_row_and_of_all() -> None:
    """Rows with positions of their own, and rows that share them: two calls of one form, each of which is proved."""
    model = model_of("Olmo2", "sdpa", intermediate_size=56).train()
    other = copy.deepcopy(model)
    ckptfused.convert(other)
    ids, places = torch.randint(1, 96, (3, 11)), torch.arange(11).expand(3, 11)
    with unfused() as reasons:
        for positions in (places, places[:1]):
            got, want = (m(ids, position_ids=positions, use_cache=False).logits for m in (other, model))
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert not reasons, reasons


def test_llama_4_as_it_was() -> None:
    """Dense layers are one op; of those with experts attention is, scaled by position where there is no RoPE, though
    the mixture returns rows.
    """
    if not hasattr(transformers, "Llama4TextConfig"):
        pytest.skip("transformers has no such model")
    sizes = {"intermediate_size": 40, "intermediate_size_mlp": 56, "num_local_experts": 4, "num_experts_per_tok": 1}
    layers = {"num_hidden_layers": 4, "interleave_moe_layer_step": 2, "no_rope_layers": [1, 1, 1, 0]}
    config = transformers.Llama4TextConfig(**{**SIZES, **sizes, **layers, "floor_scale": 3, "attn_scale": 0.7})
    torch.manual_seed(0)
    plain = transformers.Llama4ForCausalLM(config).double().train()
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    ids = torch.randint(1, 96, (2, 16))
    with unfused() as reasons:
        losses = [model(ids, labels=ids, use_cache=False).loss for model in (converted, plain)]
    assert not reasons
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    gradients = [{n: p.grad for n, p in model.named_parameters() if p.grad is not None} for model in (converted, plain)]
    close(*gradients, 1e-5)
    paths = [layer.path for layer in ckptfused.convert(converted).layers]
    assert paths == ["fused", "part", "fused", "part"]


def test_dinov3_as_it_was() -> None:
    """Its tables leave the class token and the registers out, which are not turned."""
    if not hasattr(transformers, "DINOv3ViTConfig"):
        pytest.skip("transformers has no such model")
    sizes = {"hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 2, "num_attention_heads": 4}
    still = {"pos_embed_shift": None, "pos_embed_jitter": None, "pos_embed_rescale": None}  # of each call in training
    config = transformers.DINOv3ViTConfig(**sizes, **still, image_size=32, patch_size=8, num_register_tokens=4)
    torch.manual_seed(0)
    plain = transformers.DINOv3ViTModel(config).double().train()
    for p in plain.parameters():
        torch.nn.init.normal_(p, std=0.3)
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    for size in (32, 24):
        x = torch.randn(2, 3, size, size, dtype=torch.float64)
        with unfused() as reasons:
            made, want = (model(x).last_hidden_state for model in (converted, plain))
        assert not reasons
        torch.testing.assert_close(made, want, rtol=1e-6, atol=1e-8)
        for y in (made, want):
            y.square().mean().backward()
    gradients = [{n: p.grad for n, p in model.named_parameters() if p.grad is not None} for model in (converted, plain)]
    close(*gradients, 1e-6)

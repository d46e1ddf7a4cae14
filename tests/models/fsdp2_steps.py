"""What each of two ranks does with models in FSDP2's shards."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers import Olmo2Config, Olmo2ForCausalLM

import ckptfused
from ckptfused.models.derive.derive import derive
from tests.models import zoo_decoders, zoo_encoders, zoo_llama  # noqa: F401
from tests.models.compare import all_close, close, no_worse, run, train
from tests.models.distributed_runs import alone, batch, full, fused_step, fused_steps, shard
from tests.models.ranks import RANKS
from tests.models.small import llama, unfused
from tests.models.zoo import VOCABULARY, ZOO, randomize


def fsdp2(rank: int, first: bool, reshard: bool, p: float = 0.0, offload: bool = False) -> None:
    model = llama(p=p)
    plain = copy.deepcopy(model)
    for what in ("convert", "shard") if first else ("shard", "convert"):
        if what == "convert":
            assert ckptfused.convert(model, process_group=True).fused == 2
        else:
            shard(model, reshard, offload=offload)
    if p > 0:
        ckptfused.convert(plain)  # the same masks
    all_close(fused_steps(model, rank), train(plain, alone), 1e-5)
    ckptfused.revert(model)
    if p == 0:
        close(full(run(model, batch(rank))), alone(plain), 1e-5)


def olmo2(p: float = 0.0) -> Any:
    """A model whose layers are derived."""
    sizes: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": p}
    config = Olmo2Config(**sizes, **heads, vocab_size=VOCABULARY, pad_token_id=0, attn_implementation="sdpa")
    torch.manual_seed(0)
    return randomize(Olmo2ForCausalLM(config)).train()


def fsdp2_derived(rank: int, first: bool, reshard: bool, p: float = 0.0, offload: bool = False) -> None:
    """Derived layers in shards: fused in every step, and reported so in either order."""
    model = olmo2(p)
    plain = copy.deepcopy(model)
    for what in ("convert", "shard") if first else ("shard", "convert"):
        if what == "convert":
            report = ckptfused.convert(model, process_group=True)
            assert [(one.family, one.path) for one in report.layers] == [("derived", "fused")] * 2, str(report)
        else:
            shard(model, reshard, offload=offload)
    if p > 0:
        ckptfused.convert(plain)  # the same masks
    all_close(fused_steps(model, rank), train(plain, alone), 1e-5)
    kept = {type(layer).__name__ for layer in model.model.layers}
    assert kept == {"FSDPOlmo2DecoderLayer"}
    ckptfused.revert(model)
    if p == 0:
        close(full(run(model, batch(rank))), alone(plain), 1e-5)


def fsdp2_derived_around_the_whole_model(rank: int) -> None:
    model = olmo2()
    plain = copy.deepcopy(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    ckptfused.convert(model)
    close(fused_step(model, rank), alone(plain), 1e-5)


def fsdp2_derived_watched(rank: int) -> None:
    """What a layer's code reads is compared at every call, in shards too; layers are read once a kind."""
    model = olmo2()
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.37  # a kind that nobody saw
    plain = copy.deepcopy(model)
    ckptfused.convert(model)
    shard(model)
    with counted_derivations() as derived:
        close(fused_step(model, rank), alone(plain), 1e-5)
    assert len(derived) == 1
    for one in (model, plain):
        for layer in one.model.layers:
            layer.self_attn.scaling = 0.3
            layer.post_feedforward_layernorm.variance_epsilon = 0.01
    with counted_derivations() as derived:
        close(fused_step(model, rank), alone(plain), 1e-5)
    assert len(derived) == 1


def fsdp2_derived_compiled(rank: int) -> None:
    """Each layer compiled alone, then in shards: the op is a part of the graph."""
    torch._dynamo.reset()
    gc.collect()  # a step before may have left layers of this class, of another kind
    plain = olmo2()
    model = copy.deepcopy(plain)
    ckptfused.convert(model)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    shard(model)
    with unfused() as reasons:
        close(full(run(model, batch(rank))), alone(plain), 1e-5)
    torch._dynamo.reset()
    assert not reasons, reasons


@contextlib.contextmanager
def counted_derivations() -> Iterator[list[Any]]:
    """The layers that are read within."""
    found: list[Any] = []

    def counted(layer: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(layer)
        return derive(layer, *args, **kwargs)

    with mock.patch("ckptfused.models.derive.calls.derive", counted):
        yield found


def fsdp2_root_only(rank: int, hybrid: bool) -> None:
    model = llama()
    plain = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (1, RANKS) if hybrid else (RANKS,), mesh_dim_names=("a", "b") if hybrid else None)
    fully_shard(model, mesh=mesh)
    ckptfused.convert(model)
    close(fused_step(model, rank), alone(plain), 1e-5)


def fsdp2_chunked_loss(rank: int, first: bool) -> None:
    """The head belongs to the root, which gathers it before the model's forward."""
    model = llama()
    plain = copy.deepcopy(model)
    for what in ("convert", "shard") if first else ("shard", "convert"):
        if what == "convert":
            report = ckptfused.convert(model, loss="chunked", process_group=True)
            assert [head.path for head in report.heads] == ["chunked"]
        else:
            shard(model)
    assert model(**batch(rank)).logits is None
    all_close(fused_steps(model, rank), train(plain, alone), 1e-5)


def fsdp2_sharded_head(rank: int, first: bool, reshard: bool, beside: bool) -> None:
    """FSDP gathers the weight of a head when it is called, alone or with the last norm: as of the model without the
    loss converted, for a few steps, and with gradients that are added up."""
    plain = llama()
    mesh = init_device_mesh("cpu", (RANKS,))

    def make() -> Any:
        model = copy.deepcopy(plain)
        for what in ("convert", "shard") if first else ("shard", "convert"):
            if what == "convert":
                report = ckptfused.convert(model, loss="chunked", process_group=True)
                assert [head.path for head in report.heads] == ["chunked"], str(report)
                continue
            modules: Any = [model.model.norm, model.lm_head] if beside else model.lm_head
            fully_shard(modules, mesh=mesh, reshard_after_forward=reshard)
            shard(model)
        return model

    model = make()
    assert isinstance(model.lm_head.weight, DTensor)
    out = model(**batch(rank))
    assert out.logits is None and "forward" not in vars(model.lm_head)
    out.loss.backward()
    all_close(fused_steps(model, rank), train(plain, alone), 1e-5)
    assert model.eval()(**batch(rank)).logits is not None


def fsdp2_bfloat16(rank: int) -> None:
    plain = llama()
    results = []
    for convert in (True, False):
        model = copy.deepcopy(plain)
        shard(model, policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
        if convert:
            ckptfused.convert(model)
            results.append(fused_steps(model, rank))
        else:
            results.append(train(model, lambda one: full(run(one, batch(rank)))))
    truth = train(plain, alone)
    errors = [
        sum((found[name] - t).square().sum() for found, true in zip(r, truth, strict=True) for name, t in true.items())
        for r in results
    ]
    # Roundings of four steps: over 16 draws of weights the ratio of the norms was 0.72 to 1.19, its mean 0.98.
    assert 0 < errors[0] <= 1.5**2 * errors[1], errors
    no_worse(zip(*results, truth, strict=True), torch.bfloat16)


def fsdp2_compiled(rank: int, name: str) -> None:
    """Each layer compiled alone, then in shards, as torchtitan does it."""
    torch._dynamo.reset()
    plain: Any = randomize(ZOO[name].make(0.0, "sdpa")).train()
    model = copy.deepcopy(plain)
    ckptfused.convert(model)
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in ZOO[name].layers(model):
        layer.compile(backend="aot_eager", fullgraph=True)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    got, want = fused_step(model, rank), alone(plain)
    torch._dynamo.reset()
    parts = ({key: t for key, t in found.items() if not key.endswith(ZOO[name].zero)} for found in (got, want))
    close(*parts, 1e-5)


def fsdp2_inside_a_layer(rank: int, first: bool, inner: str, reshard: bool) -> None:
    """FSDP's hooks on the inner module gather its weights, so it is called: as of the model without convert, to the
    bit, in a few steps."""
    model = llama()
    mesh = init_device_mesh("cpu", (RANKS,))

    def make(convert: bool) -> Any:
        made = copy.deepcopy(model)
        if convert and first:
            ckptfused.convert(made)
        for layer in made.model.layers:
            fully_shard(layer.get_submodule(inner), mesh=mesh, reshard_after_forward=reshard)
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(made, mesh=mesh)
        if convert and not first:
            report = ckptfused.convert(made)
            assert [layer.path for layer in report.layers] == ["generic"] * 2, str(report)
            name = type(model.model.layers[0].get_submodule(inner)).__name__
            assert f"{name} is sharded by itself (fully_shard inside the layer)" in report.layers[0].reason
        return made

    results = []
    for convert in (True, False):
        with unfused() as reasons:
            results.append(train(make(convert), lambda one: full(run(one, batch(rank)))))
        assert bool(reasons) == convert
        assert all("is sharded by itself" in reason.text for reason in reasons)
    got, want = results
    assert all(torch.equal(g[name], t) for g, w in zip(got, want, strict=True) for name, t in w.items())
    all_close(got, train(model, alone), 1e-5)


def fsdp2_checkpoint(rank: int, folder: str, p: float) -> None:
    """Saved in shards, loaded into another model and another order of calls: training goes on alike, to the bit."""

    def adamw(model: Any) -> Any:
        # With eps 1e-8 an element of a gradient that is nearly 0 would move its weight by lr, in its rounding's sign.
        return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)

    def steps(model: Any, optimizer: Any, seeds: range) -> list[dict[str, Tensor]]:
        order = iter(seeds)
        return train(model, lambda one: fused_step(one, rank, RANKS * next(order)), len(seeds), optimizer)

    model = llama(p=p)
    plain = copy.deepcopy(model)
    names = set(model.state_dict())
    ckptfused.convert(model)
    shard(model)
    optimizer = adamw(model)
    steps(model, optimizer, range(2))
    weights, state = get_state_dict(model, optimizer)
    assert set(weights) == names
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    other = shard(llama(p=p, seed=5))
    ckptfused.convert(other)
    others = adamw(other)
    weights, state = get_state_dict(other, others)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(other, others, model_state_dict=weights, optim_state_dict=state)
    went_on, resumed = steps(model, optimizer, range(2, 4)), steps(other, others, range(2, 4))
    assert all(
        torch.equal(found[name], t) for found, want in zip(resumed, went_on, strict=True) for name, t in want.items()
    )
    if p > 0:
        ckptfused.convert(plain)  # the same masks
    order = iter(range(4))
    all_close(resumed, train(plain, lambda one: alone(one, RANKS * next(order)), 4, adamw(plain))[2:], 1e-5)

"""What each of two ranks does with adapters, mixtures of experts and encoder-decoders, and FSDP1's checkpoints."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import ckptfused
from tests.models import zoo_moe, zoo_seq2seq  # noqa: F401
from tests.models.compare import all_close, close, run, train
from tests.models.distributed_runs import alone, batch, full, fused_steps, shard
from tests.models.ranks import RANKS
from tests.models.small import llama, unfused
from tests.models.zoo import VOCABULARY, ZOO, randomize


def fsdp1_steps(model: Any, optimizer: Any, rank: int, seeds: range) -> list[Tensor]:
    losses = []
    for seed in seeds:
        torch.manual_seed(RANKS * seed + rank)
        with unfused() as reasons:
            losses.append(run(model, batch(rank))["loss"])
        assert not reasons, reasons
        optimizer.step()
    return losses


def fsdp1_checkpoint(rank: int, folder: str, original_parameters: bool) -> None:
    """Saved in shards halfway, loaded into another model: it trains on as the first one does, dropout included."""

    def make(seed: int, first: bool) -> tuple[Any, Any]:
        model: Any = llama(p=0.25, seed=seed)
        if first:
            ckptfused.convert(model)
        wrapped = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
            use_orig_params=original_parameters,
            device_id=torch.device("cpu"),
        )
        if not first:
            ckptfused.convert(wrapped)
        return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-2)

    def in_shards(model: Any) -> Any:
        # Without what FSDP1 would copy to a device that is not there.
        return FullyShardedDataParallel.state_dict_type(
            model,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=False),
            ShardedOptimStateDictConfig(offload_to_cpu=False),
        )

    model, optimizer = make(0, first=True)
    fsdp1_steps(model, optimizer, rank, range(2))
    with in_shards(model):
        saved = {"model": model.state_dict(), "optimizer": FullyShardedDataParallel.optim_state_dict(model, optimizer)}
        assert set(saved["model"]) == set(llama().state_dict())
        dcp.save(saved, checkpoint_id=folder)
    other, others = make(5, first=False)
    with in_shards(other):
        found: dict[str, Any] = {"model": other.state_dict()}
        dcp.load(found, checkpoint_id=folder)
        other.load_state_dict(found["model"])
        state = load_sharded_optimizer_state_dict(found["model"], "optimizer", FileSystemReader(folder))
        others.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(other, others, state["optimizer"]))
    went_on = fsdp1_steps(model, optimizer, rank, range(2, 4))
    assert went_on == fsdp1_steps(other, others, rank, range(2, 4))
    assert went_on[0] != went_on[1]


def adapters(rank: int, order: str) -> None:
    """LoRA under FSDP2: convert, get_peft_model and fully_shard in any order."""
    import peft

    def adapt(base: Any) -> Any:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj", "down_proj"], init_lora_weights=False)
        return peft.get_peft_model(base, config).train()

    plain = adapt(llama())
    base: Any = llama()
    model: Any = None
    for what in order.split("-"):
        if what == "convert":
            assert ckptfused.convert(base if model is None else model).fused == 2
        elif what == "adapt":
            model = adapt(base)
        else:
            shard(base)
    want = train(plain, alone)
    assert all("lora" in name for name in want[0] if name != "loss")
    all_close(fused_steps(model, rank), want, 1e-5)


def few_bits(rank: int, first: bool, storage: str, nested: bool) -> None:
    """LoRA beside 4 bits of bitsandbytes, stored in floats as FSDP2 needs them."""
    import peft
    from bitsandbytes.nn import Linear4bit

    def make() -> Any:
        model: Any = llama()
        options: Any = {"compute_dtype": torch.float32, "compress_statistics": nested, "quant_type": "nf4"}
        for layer in model.model.layers:
            for block in (layer.self_attn, layer.mlp):
                for name, child in list(block.named_children()):
                    if type(child) is nn.Linear:
                        sizes = child.in_features, child.out_features, False
                        made = Linear4bit(*sizes, **options, quant_storage=getattr(torch, storage))
                        made.load_state_dict(child.state_dict())
                        setattr(block, name, made.to("cpu"))
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj", "down_proj"], init_lora_weights=False)
        return peft.get_peft_model(model, config).train()

    plain, model = make(), make()
    if first:
        assert ckptfused.convert(model).fused == 2
    shard(model.base_model.model)
    if not first:
        assert ckptfused.convert(model).fused == 2
    all_close(fused_steps(model, rank), train(plain, alone), 1e-5)


def experts_in_shards(rank: int) -> None:
    """Experts whose weights are DTensors of somebody's own are left alone, and named."""
    model: Any = randomize(ZOO["mixtral"].make(0.0, "sdpa")).train()
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        held = layer.mlp.experts
        held.gate_up_proj = nn.Parameter(distribute_tensor(held.gate_up_proj.data, mesh, [Shard(0)]))
    report = ckptfused.convert(model)
    assert {layer.path for layer in report.layers} == {"part"}
    assert any("in backward: a weight is a DTensor" in note for note in report.notes)


def composite_batch(name: str, rank: int) -> dict[str, Any]:
    """Another batch on each rank."""
    found: dict[str, Any] = {**ZOO[name].batch(), "use_cache": False}
    found["labels"] = torch.where(found["labels"] < 0, found["labels"], (found["labels"] + 3 * rank) % VOCABULARY)
    if "input_ids" in found:
        found["input_ids"] = (found["input_ids"] + 7 * rank) % VOCABULARY
    else:
        found["input_features"] = found["input_features"] * (1 + rank)
    return found


def composites(rank: int, name: str, how: str) -> None:
    """Fused halves and checkpointed pieces, replicated or in shards, converted before and after."""
    for first, p in ((True, 0.0), (False, 0.25)):
        plain: Any = randomize(ZOO[name].make(p, "sdpa")).train()
        model = copy.deepcopy(plain)
        if first:
            ckptfused.convert(model)
        layers = ZOO[name].layers(model)
        if how == "fsdp2":
            mesh = init_device_mesh("cpu", (RANKS,))
            for layer in layers:
                fully_shard(layer, mesh=mesh)
            wrapped = fully_shard(model, mesh=mesh)
        else:
            wrapped = DistributedDataParallel(model)
        if not first:
            report = ckptfused.convert(wrapped)
            assert len(report.layers) == len(layers)
            assert {layer.path for layer in report.layers} <= {"part", "fused"}, str(report)
            assert not any("run as they did" in note for note in report.notes)  # experts
        if p > 0:
            ckptfused.convert(plain)  # the same masks
        results = []
        for one in range(RANKS):
            torch.manual_seed(one)
            results.append(run(plain, composite_batch(name, one)))
        want = {key: sum(r[key] for r in results) / RANKS for key in results[0]}
        for _ in range(2):
            torch.manual_seed(rank)
            with unfused() as reasons:
                got = full(run(wrapped, composite_batch(name, rank)))
            assert not reasons, reasons
            close(got, want, 1e-5)  # type: ignore[arg-type]


def adapters_in_shards_of_their_own(rank: int, first: bool) -> None:
    """FSDP1 with PEFT's policy, which wraps each A and B inside the layers."""
    import peft
    from peft.utils.other import fsdp_auto_wrap_policy

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    plain = peft.get_peft_model(llama(), config).train()
    model = copy.deepcopy(plain)
    if first:
        assert ckptfused.convert(model).fused == 2
    wrapped = FullyShardedDataParallel(
        model, auto_wrap_policy=fsdp_auto_wrap_policy(model), use_orig_params=False, device_id=torch.device("cpu")
    )
    if not first:
        report = ckptfused.convert(wrapped)
        assert {layer.path for layer in report.layers} == {"generic"}
        assert all("an adapter whose A or B" in layer.reason for layer in report.layers)
    optimizers = [torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1) for one in (wrapped, plain)]
    for _ in range(2):
        with unfused() as reasons:
            run(wrapped, batch(rank))
        assert len(reasons) == 2
        optimizers[0].step()
        alone(plain)
        optimizers[1].step()
    with FullyShardedDataParallel.summon_full_params(wrapped):
        got = {name.replace("_fsdp_wrapped_module.", ""): t.detach() for name, t in wrapped.named_parameters()}
        close(got, {name: t.detach() for name, t in plain.named_parameters()}, 1e-5)

"""Sharded and replicated models, two processes over gloo: gradients as of the unconverted model on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from ckptfused import CheckpointPolicy
from tests.models import agreement_steps, fsdp2_steps, segment_steps, wrapper_steps
from tests.models import distributed_models as models
from tests.models.ranks import Ranks

pytestmark = pytest.mark.each_torch

both_orders = pytest.mark.parametrize("first", [True, False], ids=["convert-wrap", "wrap-convert"])


@both_orders
@pytest.mark.parametrize("p", [0.0, 0.25])
@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2(ranks: Ranks, reshard: bool, p: float, first: bool) -> None:
    ranks.run(fsdp2_steps.fsdp2, first=first, reshard=reshard, p=p)


@both_orders
@pytest.mark.parametrize("p", [0.0, 0.25])
@pytest.mark.parametrize("reshard", [True, False])
def test_derived_layers_under_fsdp2(ranks: Ranks, reshard: bool, p: float, first: bool) -> None:
    ranks.run(fsdp2_steps.fsdp2_derived, first=first, reshard=reshard, p=p)


def test_derived_layers_under_fsdp2_with_cpu_offload(ranks: Ranks) -> None:
    ranks.run(fsdp2_steps.fsdp2_derived, first=True, reshard=True, offload=True)


def test_derived_layers_under_fsdp2_around_the_whole_model(ranks: Ranks) -> None:
    ranks.run(fsdp2_steps.fsdp2_derived_around_the_whole_model)


@pytest.mark.slow
def test_derived_layers_compiled_under_fsdp2(ranks: Ranks) -> None:
    ranks.run(fsdp2_steps.fsdp2_derived_compiled)


def test_derived_layers_under_fsdp2_are_watched(ranks: Ranks) -> None:
    ranks.run(fsdp2_steps.fsdp2_derived_watched)


@pytest.mark.parametrize("hybrid", [False, True])
def test_fsdp2_around_the_whole_model(ranks: Ranks, hybrid: bool) -> None:
    ranks.run(fsdp2_steps.fsdp2_root_only, hybrid=hybrid)


@both_orders
def test_fsdp2_chunked_loss(ranks: Ranks, first: bool) -> None:
    ranks.run(fsdp2_steps.fsdp2_chunked_loss, first=first)


@pytest.mark.parametrize(("reshard", "beside"), [(True, False), (False, False), (True, True)])
def test_fsdp2_sharded_head(ranks: Ranks, reshard: bool, beside: bool) -> None:
    ranks.run(fsdp2_steps.fsdp2_sharded_head, first=beside, reshard=reshard, beside=beside)


def test_fsdp2_bfloat16(ranks: Ranks) -> None:
    ranks.run(fsdp2_steps.fsdp2_bfloat16)


def test_fsdp2_cpu_offload(ranks: Ranks) -> None:
    ranks.run(fsdp2_steps.fsdp2, first=True, reshard=True, offload=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "neox", "bert", "opt", "phi3"])
def test_fsdp2_compiled_layers(ranks: Ranks, name: str) -> None:
    ranks.run(fsdp2_steps.fsdp2_compiled, name=name)


@both_orders
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("inner", ["input_layernorm", "mlp", "self_attn.q_proj"])
def test_fsdp2_inside_a_layer(ranks: Ranks, inner: str, reshard: bool, first: bool) -> None:
    ranks.run(fsdp2_steps.fsdp2_inside_a_layer, first=first, inner=inner, reshard=reshard)


@pytest.mark.parametrize("p", [0.0, 0.25])
def test_fsdp2_distributed_checkpoint(ranks: Ranks, p: float, tmp_path: Any) -> None:
    ranks.run(fsdp2_steps.fsdp2_checkpoint, folder=str(tmp_path), p=p)


@both_orders
@pytest.mark.parametrize("original_parameters", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.25])
def test_fsdp1(ranks: Ranks, p: float, original_parameters: bool, first: bool) -> None:
    ranks.run(wrapper_steps.fsdp1, first=first, original_parameters=original_parameters, p=p)


@both_orders
def test_fsdp1_around_derived_layers(ranks: Ranks, first: bool) -> None:
    """They stay fused where FSDP1 leaves them their own parameters."""
    ranks.run(wrapper_steps.fsdp1, first=first, original_parameters=True, p=0.25, name="neox")


@pytest.mark.parametrize("original_parameters", [True, False])
def test_fsdp1_distributed_checkpoint(ranks: Ranks, original_parameters: bool, tmp_path: Any) -> None:
    ranks.run(models.fsdp1_checkpoint, folder=str(tmp_path), original_parameters=original_parameters)


@pytest.mark.parametrize("order", ["convert-adapt-shard", "adapt-convert-shard", "adapt-shard-convert"])
def test_adapters_under_fsdp2(ranks: Ranks, order: str) -> None:
    pytest.importorskip("peft")
    ranks.run(models.adapters, order=order)


@both_orders
def test_adapters_in_shards_of_their_own(ranks: Ranks, first: bool) -> None:
    pytest.importorskip("peft")
    ranks.run(models.adapters_in_shards_of_their_own, first=first)


@both_orders
@pytest.mark.parametrize(("storage", "nested"), [("float32", True), ("bfloat16", False), ("float16", True)])
def test_few_bits_under_fsdp2(ranks: Ranks, storage: str, nested: bool, first: bool) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    ranks.run(models.few_bits, first=first, storage=storage, nested=nested)


def test_experts_in_shards_are_left_alone(ranks: Ranks) -> None:
    ranks.run(models.experts_in_shards)


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", ["mixtral", "t5", "whisper"])
def test_composites(ranks: Ranks, name: str, how: str) -> None:
    ranks.run(models.composites, name=name, how=how)


@both_orders
@pytest.mark.parametrize("p", [0.0, 0.25])
def test_ddp(ranks: Ranks, p: float, first: bool) -> None:
    ranks.run(wrapper_steps.ddp, first=first, p=p)


def test_ddp_chunked_loss(ranks: Ranks) -> None:
    ranks.run(wrapper_steps.ddp_chunked_loss)


@pytest.mark.parametrize("option", ["static_graph", "gradient_as_bucket_view", "find_unused_parameters"])
def test_ddp_options(ranks: Ranks, option: str) -> None:
    ranks.run(wrapper_steps.ddp, first=True, **{option: True})


@pytest.mark.parametrize("sharded", [False, True])
@both_orders
def test_tensor_parallel_is_refused(ranks: Ranks, first: bool, sharded: bool) -> None:
    ranks.run(wrapper_steps.tensor_parallel, first=first, sharded=sharded)


@pytest.mark.parametrize("change", ["none", "policy", "layers", "patch"])
def test_agreement(ranks: Ranks, change: str) -> None:
    ranks.run(agreement_steps.agreement, change=change)


def test_agreement_on_the_loss(ranks: Ranks) -> None:
    ranks.run(agreement_steps.agreement_on_the_loss)


def test_agreement_where_a_rank_fails(ranks: Ranks) -> None:
    ranks.run(agreement_steps.agreement_with_a_failure)


@pytest.mark.parametrize(
    ("first", "reshard", "keep"), [(True, True, "inputs"), (False, False, "all"), (True, True, None)]
)
def test_segments_under_fsdp2(ranks: Ranks, first: bool, reshard: bool, keep: str | None) -> None:
    ranks.run(segment_steps.fsdp2_segments, first=first, reshard=reshard, keep=keep)


@both_orders
@pytest.mark.parametrize("original_parameters", [True, False])
def test_segments_under_fsdp1_are_single_layers(ranks: Ranks, original_parameters: bool, first: bool) -> None:
    """A replay would not find its views of the weights."""
    policy = CheckpointPolicy.whole_model()
    ranks.run(wrapper_steps.fsdp1, first=first, original_parameters=original_parameters, policy=policy)


def test_segments_under_ddp(ranks: Ranks) -> None:
    ranks.run(segment_steps.ddp_segments)


@pytest.mark.parametrize("what", ["segments", "modes"])
def test_agreement_on_the_policy(ranks: Ranks, what: str) -> None:
    ranks.run(agreement_steps.agreement_on_the_policy, what=what)


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [agreement_steps.one_plan_for_all, agreement_steps.no_plan_for_any, agreement_steps.plans_of_their_own],
    ids=lambda what: what.__name__,
)
def test_plans(ranks: Ranks, what: Any) -> None:
    ranks.run(what)


def test_predictions_of_shards_are_refused(ranks: Ranks) -> None:
    ranks.run(agreement_steps.tensors_in_shards)

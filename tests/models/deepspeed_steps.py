"""What each of two ranks does under DeepSpeed, on the CPU."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import ckptfused
from tests.models.compare import close
from tests.models.distributed_runs import batch
from tests.models.small import llama, unfused


def start(rank: int) -> Any:
    """DeepSpeed on the process group that is there; none of its operators are compiled."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank)}
    import deepspeed

    deepspeed.ops.__compatible_ops__.update(dict.fromkeys(deepspeed.ops.__compatible_ops__, False))
    deepspeed.init_distributed(dist_backend="gloo")
    return deepspeed


def adapted() -> Any:
    """LoRA beside a frozen base. Without a gradient of the input DeepSpeed itself fails with whole layers."""
    import peft

    base: Any = llama()
    base.enable_input_require_grads()
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(base, config).train()


def zero(rank: int, stage: int, whole_layers: bool, first: bool, adapters: bool = False) -> None:
    """Losses and gradients of three steps, converted and not.

    Stage 3 gathers the weights of a module when it runs, by hooks on all modules; `whole_layers`: of a layer at once.
    """
    deepspeed = start(rank)
    from deepspeed.utils import safe_get_full_grad, set_z3_leaf_modules

    plain = adapted() if adapters else llama()
    steps: list[list[dict[str, Tensor]]] = []
    for convert in (False, True):
        model: Any = copy.deepcopy(plain)
        if convert and first:
            assert ckptfused.convert(model).fused == 2
        if whole_layers:
            set_z3_leaf_modules(model, [LlamaDecoderLayer])
        shards = {"stage": stage, "stage3_param_persistence_threshold": 0}
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
            config={
                "train_micro_batch_size_per_gpu": 3,
                "zero_optimization": shards,
                "zero_allow_untested_optimizer": True,
            },
        )
        whole = stage < 3 or whole_layers
        if convert and not first:
            report = ckptfused.convert(engine.module)
            assert {layer.path for layer in report.layers} == {"fused" if whole else "generic"}, str(report)
            assert whole or "has a hook" in report.layers[0].reason
        steps.append([])
        for _ in range(3):
            with unfused() as reasons:
                loss = engine(**batch(rank)).loss
            assert len(reasons) == (2 if convert and not whole else 0)
            engine.backward(loss)
            trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
            gradients = {name: safe_get_full_grad(p).clone() for name, p in trained}
            steps[-1].append({"loss": loss.detach(), **gradients})
            engine.step()
        engine.destroy()
    for want, got in zip(*steps, strict=True):
        close(got, want, 1e-5)

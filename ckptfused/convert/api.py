"""`convert`: one call turns an existing model into a fused-checkpoint model."""

from __future__ import annotations

from typing import Any

from torch import nn

from ckptfused.convert.apply import apply
from ckptfused.convert.policy import CheckpointPolicy
from ckptfused.convert.report import Report
from ckptfused.spec import Keep


def convert(
    model: nn.Module,
    keep: Keep | None = None,
    *,
    policy: CheckpointPolicy | None = None,
    loss: str | None = None,
    scratch: int | str | None = None,
    offload: bool = False,
    process_group: Any = None,
) -> Report:
    """Turns an existing model into a fused-checkpoint model, in place.

    Each layer gets a `forward` of its own, as an attribute of the instance; its class, parameters, submodules,
    hooks and `state_dict` stay as they are. A layer that an adapter reads runs as one fused op that saves its
    input; any other is checkpointed with `ckptfused.checkpoint`. What is safe is decided at each call: with a
    key/value cache, or where attention weights are asked for, a layer runs as it was. A second `convert` changes
    what is kept. `revert` undoes it.

    keep: what each layer keeps for backward beside its input: a preset or names (`ckptfused.spec.KEEP_PRESETS`);
    None: "inputs", or what the policy says.
    policy: what differs from layer to layer, in the place of all other options (docs/policies.md).
    loss: "chunked" has Hugging Face's language models make their loss without ever holding the logits
    (`ckptfused.linear_cross_entropy`), in training where labels are given; `outputs.logits` is then None. Evaluation,
    generation, `logits_to_keep` and loss functions of your own run as they did. None: as they were.
    scratch: bytes that the hidden-wide values of a layer's FFN may take at a time in backward, and so the logits of a
    chunked loss; more of them go in tiles. An int or "64MiB"; None: by device (docs/keep.md).
    offload: the input that each layer saves goes to host memory while the next layers run, and comes back a layer ahead
    of its use (docs/keep.md); the last layer's stays, and so does what is on the CPU.
    process_group: a `torch.distributed` group, or True for the default one; the call is then a collective which
    checks that all ranks convert alike. None: no communication.

    **Saves** in each fused layer x, what `keep` names, 16 bytes of random state where it has dropout.
    **Recomputes** the rest in backward.
    **Raises** `ValueError` for an unknown `keep`, `loss` or `scratch`, for a policy with other options beside it or for
    another number of layers, for tensor-parallel weights and `nn.DataParallel`, and, with `process_group`, where ranks
    differ; `TypeError` if `model` is no module. The model is then as it was.
    """
    if policy is None:
        limits = {"scratch": scratch} | ({} if loss is None else {"loss": loss, "loss_scratch": scratch})
        policy = CheckpointPolicy.uniform("inputs" if keep is None else keep, offload=offload, **limits)
    else:
        _check_policy_alone(policy, {"keep": keep, "loss": loss, "scratch": scratch, "offload": offload or None})
    return apply(model, policy, process_group)


def _check_policy_alone(policy: CheckpointPolicy, others: dict[str, Any]) -> None:
    if not isinstance(policy, CheckpointPolicy):
        raise TypeError(f"policy: expected a CheckpointPolicy, got {policy!r}")
    given = [f"{name}={value!r}" for name, value in others.items() if value is not None]
    if given:
        raise ValueError(
            f"convert: expected a policy alone, which says all of this, got {', '.join(given)} beside it. Make it part "
            "of the policy"
        )

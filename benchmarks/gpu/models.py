"""Hugging Face models of real sizes, random weights, through `convert`: step time and peak memory of a training loop.

    python -m benchmarks.gpu.models --seconds 150
    python -m benchmarks.gpu.models --only "qwen3-0.6b, LoRA"

A step is what Trainer makes of one: loss, backward, clipped gradients, AdamW. One model runs as it was, under Hugging
Face's own checkpointing and converted, in turn; losses and gradient norms are compared first, from the same weights,
where there is no dropout. Each setting is a process of its own. Needs transformers, and peft for LoRA.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import ckptfused
from benchmarks.gpu import isolated
from benchmarks.gpu.graphs import captured, step_of
from benchmarks.gpu.summary import model_table
from benchmarks.gpu.timing import Clock, parser, path_of, write

QWEN = {
    **{"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "head_dim": 128},
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True, "use_cache": False},
}
LLAMA = {
    **{"vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True, "use_cache": False},
}
TINY = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "head_dim": 16}
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {
    "qwen3-0.6b": ("Qwen3", QWEN, (4, 4096)),
    "llama-3-8b, 4 layers": ("Llama", LLAMA, (2, 4096)),
}
SETTINGS = ("as it is", "dropout", "LoRA", "CUDA graph", "torch.compile")
NAMES = [f"{model}, {setting}" for setting in SETTINGS for model in MODELS]
PLAIN, CHECKPOINTED = "as it was", "Hugging Face's checkpointing"
CONVERTED: dict[str, dict[str, Any]] = {
    "convert, inputs": {"keep": "inputs"},
    "convert, attention+mid": {"keep": "attention+mid"},
    "convert, inputs, chunked loss": {"keep": "inputs", "loss": "chunked"},
}
VARIANTS = (PLAIN, CHECKPOINTED, *CONVERTED)
CLOSE = 0.02
"""Relative difference of the loss and of the gradients' norm, bfloat16 rounded in another order, against the model as
it was.
"""
STARTING = 60  # seconds


def make(name: str, options: Namespace) -> tuple[Any, dict[str, Tensor]]:
    """The model, made on the device, and a batch."""
    import transformers

    model_name, setting = name.rsplit(", ", 1)
    kind, sizes, shape = MODELS[model_name]
    if setting == "torch.compile":  # which takes time for each layer
        sizes = sizes | {"num_hidden_layers": 4}
    sizes, shape = (sizes | TINY, (2, 32)) if options.tiny else (sizes, shape)
    dropout = 0.1 if setting == "dropout" else 0.0
    config = getattr(transformers, f"{kind}Config")(**sizes, attention_dropout=dropout)
    with torch.device(options.device):
        model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16).train()
        ids = torch.randint(sizes["vocab_size"], shape)
    if setting == "LoRA":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, lora_dropout=0.0, target_modules="all-linear"))
    return model, {"input_ids": ids, "labels": ids}


def become(model: Any, variant: str) -> str:
    """Makes the model train so; what `convert` did of it."""
    ckptfused.revert(model)
    if variant == CHECKPOINTED:
        _checkpointing(model, "enable")({"use_reentrant": False})
        return ""
    _checkpointing(model, "disable")()
    if variant == PLAIN:
        return ""
    report = ckptfused.convert(model, **CONVERTED[variant])
    return f"{report.fused} of {len(report.layers)} layers fused"


def _checkpointing(model: Any, verb: str) -> Callable[..., None]:
    """By the name that this transformers has for it: the first is the newer."""
    return getattr(model, f"activation_checkpointing_{verb}", None) or getattr(model, f"gradient_checkpointing_{verb}")


class Loop:
    """Trainer's loop: one step at a call."""

    def __init__(self, model: Any, batch: dict[str, Tensor], call: Callable[..., Any]) -> None:
        self.weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # At a rate of 0 a step is as much work, and all variants have the same weights.
        self.optimizer = torch.optim.AdamW(self.weights, lr=0.0, fused=batch["input_ids"].is_cuda)
        self.batch, self.call = batch, call

    def gradients(self) -> tuple[float, float]:
        """The loss and the norm of its gradients; no weight changes."""
        loss = self.call(**self.batch).loss
        loss.backward()
        norm = torch.nn.utils.get_total_norm([w.grad for w in self.weights if w.grad is not None])
        self.optimizer.zero_grad()
        return loss.item(), norm.item()

    def step(self) -> None:
        self.call(**self.batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def peak(step: Callable[[], object], device: str) -> dict[str, int]:
    """Bytes at the most in a step, and before it: weights and the optimizer's state."""
    if device != "cuda":
        return {}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return {"state": before, "peak": torch.cuda.max_memory_allocated()}


def one(options: Namespace) -> None:
    """All variants of one model in one setting."""
    torch.manual_seed(0)
    setting = options.only.rsplit(", ", 1)[1]
    model, batch = make(options.only, options)
    call: Callable[..., Any] = model
    if setting == "torch.compile":
        call = torch.compile(model, backend="inductor" if options.device == "cuda" else "aot_eager")
        torch._dynamo.config.recompile_limit = 64  # each variant is compiled anew
    loop, clock = Loop(model, batch, call), Clock(options.device)
    found: dict[str, Any] = {}
    failed: dict[str, str] = {}
    right: tuple[float, float] | None = None
    # Under PyTorch's checkpointing a graph cannot be captured: it reads the generator's state.
    for variant in [name for name in VARIANTS if (setting, name) != ("CUDA graph", CHECKPOINTED)]:
        try:
            said = become(model, variant)
            numbers = loop.gradients()
            right = numbers if right is None else right
            if setting != "dropout" and not _close(numbers, right):
                raise ValueError(f"wrong: loss and gradients' norm {numbers}, as it was {right}")
            step: Callable[[], object] = loop.step
            if setting == "CUDA graph":
                step = captured(step_of(model, batch["input_ids"]), options.device)
            step()
            memory = peak(step, options.device)
            times = clock.compare({variant: step}, options.seconds / len(VARIANTS), rounds=15)[variant]
            found[variant] = {**vars(times), **memory, "loss": numbers[0], "norm": numbers[1], "said": said}
        except (RuntimeError, ValueError) as error:
            failed[variant] = (str(error).splitlines() or [repr(error)])[0]
        isolated.give({"variants": found, "failed": failed})  # if time runs out, what was measured stays


def _close(found: tuple[float, float], right: tuple[float, float]) -> bool:
    return all(abs(a - b) <= CLOSE * abs(b) for a, b in zip(found, right, strict=True))


def every(options: Namespace) -> None:
    words = ["--device", options.device, "--seconds", f"{options.seconds / len(NAMES):.1f}"]
    words += ["--tiny"] if options.tiny else []
    limit = STARTING + options.seconds if options.device == "cuda" else isolated.UNHURRIED
    ended: list[isolated.Ended] = []
    for each in isolated.run_each(__spec__.name, NAMES, words, 1, limit):
        ended.append(each)
        save(options, ended)
    print(model_table({each.name: each.result for each in ended if each.result}))
    print(isolated.shown(ended))
    print(f"written: {path_of(options, 'models')}")
    if bad := failures(ended):
        raise SystemExit(f"failed: {', '.join(bad)}")


def failures(ended: list[isolated.Ended]) -> dict[str, Any]:
    """Settings that ended badly, and variants that failed within one."""
    within = {
        f"{each.name}: {variant}": said for each in ended for variant, said in each.result.get("failed", {}).items()
    }
    return {**isolated.failures(ended), **within}


def save(options: Namespace, ended: list[isolated.Ended]) -> None:
    found = {each.name: each.result for each in ended if each.result}
    write(options, "models", {"models": found, "failed": failures(ended), "goals": []})


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--only", choices=NAMES, metavar="NAME", help=f"in this process, one of {'; '.join(NAMES)}")
    options = words.parse_args()
    (one if options.only else every)(options)


if __name__ == "__main__":
    main()

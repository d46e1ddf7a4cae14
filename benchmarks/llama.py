"""The small Llama in float32 of which whole steps are measured on the CPU, and its training step."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import environment
from benchmarks.commands import command_line, write
from benchmarks.memory import memory_of

MIB = 2**20


@dataclass(frozen=True)
class Sizes:
    """The model and its batch."""

    layers: int = 12
    width: int = 384
    hidden: int = 1024
    heads: int = 6
    vocabulary: int = 4096
    batch: int = 4
    tokens: int = 512


def make(sizes: Sizes, seed: int) -> nn.Module:
    """A Llama with random weights in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        max_position_embeddings=sizes.tokens,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def batch_of(sizes: Sizes, seed: int) -> dict[str, Tensor]:
    """Random tokens, which are their own labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, sizes.vocabulary, (sizes.batch, sizes.tokens), generator=generator)
    return {"input_ids": ids, "labels": ids}


def step_of(model: Any, batch: dict[str, Tensor]) -> Callable[[], None]:
    """Forward and backward; the gradients are made anew."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(**batch).loss.backward()

    return step


def peak_of(model: Any, batch: dict[str, Tensor]) -> int:
    """Bytes at the peak of a second step, weights and batch included."""
    step = step_of(model, batch)
    step()
    model.zero_grad(set_to_none=True)
    owned = {t.untyped_storage().data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    return sum(owned.values()) + batch["input_ids"].nbytes + memory_of(step).peak


def check_losses(losses: Mapping[str, float], reference: str) -> float:
    """The largest relative difference of losses, of which those of one variant are the reference.

    **Raises** `SystemExit` where sums in another order cannot explain it.
    """
    differences = [abs(loss / losses[reference] - 1) for loss in losses.values()]
    if not all(difference <= 1e-5 for difference in differences):  # NaN is not
        raise SystemExit(f"loss check failed, no time reported: {dict(losses)}")
    return max(differences)


def command(
    doc: str | None,
    budget: float,
    stem: str,
    measure: Callable[[Sizes, Namespace], dict[str, Any]],
    markdown: Callable[[dict[str, Any]], str],
) -> None:
    """A measurement from the command line: of the sizes that are asked for, written as `stem`-<layers>x<width>."""
    parser = command_line(doc, budget)
    for name, value in asdict(Sizes()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    sizes = Sizes(**{name: getattr(arguments, name) for name in asdict(Sizes())})
    result = measure(sizes, arguments) | {"environment": environment.describe()}
    write(result, markdown, arguments, f"{stem}-{sizes.layers}x{sizes.width}")

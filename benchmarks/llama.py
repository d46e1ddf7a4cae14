"""The small Llama in float32 of which whole steps are measured on the CPU, and its training step."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.benchmark import Sizes
from benchmarks.memory import memory_of


@dataclass(frozen=True, kw_only=True)
class LlamaSizes(Sizes):
    """The model and its batch."""

    layers: int = 12
    width: int = 384
    hidden: int = 1024
    heads: int = 6
    vocabulary: int = 4096
    batch: int = 4
    tokens: int = 512


def config(layers: int, width: int, hidden: int, heads: int, vocabulary: int, tokens: int, **options: Any) -> Any:
    """A Llama's configuration, for training."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=tokens,
        use_cache=False,
        **options,
    )


def in_4_bits(model: Any, dtype: torch.dtype) -> Any:
    """A model of Hugging Face's as bitsandbytes stores it: projections in nf4 with nested scales, multiplied in this
    type."""
    from transformers import BitsAndBytesConfig

    few = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    with tempfile.TemporaryDirectory() as folder:
        model.to(dtype).save_pretrained(folder)
        return type(model).from_pretrained(folder, dtype=dtype, quantization_config=few)


def make(sizes: LlamaSizes) -> nn.Module:
    """A Llama with random weights in float32."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(sizes.seed)
    s = sizes
    return LlamaForCausalLM(config(s.layers, s.width, s.hidden, s.heads, s.vocabulary, s.tokens)).train()


def batch_of(sizes: LlamaSizes) -> dict[str, Tensor]:
    """Random tokens, which are their own labels."""
    generator = torch.Generator().manual_seed(sizes.seed)
    ids = torch.randint(0, sizes.vocabulary, (sizes.batch, sizes.tokens), generator=generator)
    return {"input_ids": ids, "labels": ids}


@dataclass
class LlamaStep:
    """Forward and backward of a model; the gradients are made anew."""

    model: Any
    batch: dict[str, Tensor]
    plan: Any = None
    """The plan that the model was converted by, if any."""

    def __call__(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.model(**self.batch).loss.backward()

    def loss(self) -> float:
        return self.model(**self.batch).loss.item()

    def peak(self) -> int:
        """Bytes at the peak of a second step, weights and batch included."""
        self()
        self.model.zero_grad(set_to_none=True)
        owned = {t.untyped_storage().data_ptr(): t.nbytes for t in (*self.model.parameters(), *self.model.buffers())}
        return sum(owned.values()) + self.batch["input_ids"].nbytes + memory_of(self).peak

    def weights(self) -> int:
        """Bytes of parameters."""
        return sum(p.nbytes for p in self.model.parameters())


def check_losses(losses: Mapping[str, float], reference: str) -> float:
    """The largest relative difference of losses, of which those of one variant are the reference.

    **Raises** `SystemExit` where sums in another order cannot explain it.
    """
    differences = [abs(loss / losses[reference] - 1) for loss in losses.values()]
    if not all(difference <= 1e-5 for difference in differences):  # NaN is not
        raise SystemExit(f"loss check failed, no time reported: {dict(losses)}")
    return max(differences)


def same_losses(steps: Mapping[str, Any], reference: str) -> str:
    """Says how far the losses of all variants are from that of one, as `check_losses`."""
    worst = check_losses({name: step.loss() for name, step in steps.items()}, reference)
    return f"losses differ by {worst:.1g} of themselves at most"


def described(sizes: LlamaSizes, what: str) -> str:
    """The model and its step, in a sentence."""
    return (
        f"Llama of {sizes.layers} layers, C {sizes.width}, F {sizes.hidden}, {sizes.heads} heads, vocabulary "
        f"{sizes.vocabulary:,}, {sizes.batch} × {sizes.tokens} tokens, float32; {what}."
    )

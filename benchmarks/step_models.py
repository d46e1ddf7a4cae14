"""What `step.py` trains: stacks of layers alone, and small models with their loss and optimizer."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases import LLAMA
from benchmarks.llama import config, in_4_bits
from benchmarks.step_batches import Batch, Shape, pictures, rows, side_of, text


@dataclass(frozen=True)
class StepCase:
    """One model in two sizes."""

    about: str
    two_cores: Shape
    full: Shape
    make: Callable[[Shape, torch.dtype], Any]
    """The model with random weights."""
    batch: Callable[[Shape, torch.dtype], Batch]
    whole: bool = True
    """A model with its loss, that an optimizer updates; or a stack of layers, forward and backward alone."""
    exact: Callable[[Any], Any] = lambda model: copy.deepcopy(model).double()
    """A model's copy in float64."""
    causal: bool = False
    """A decoder whose loss is of the next token."""
    compared_in: str = ""
    """The type in which gradients are compared; "": the one that is timed."""

    def shape(self, size: str) -> Shape:
        """The sizes by their name; the tiny ones show that everything runs."""
        if size == "tiny":
            return replace(self.two_cores, layers=2, width=64, heads=2, batch=2, tokens=64, vocabulary=64)
        return self.full if size == "full" else self.two_cores


class Stack(nn.Module):
    """Layers one after another; called, the sum of their output times what comes back."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor, dy: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x * dy).sum()


def loss_of(model: Any, batch: Batch) -> Tensor:
    """What backward starts from."""
    found = model(**batch)
    return found if isinstance(found, Tensor) else found.loss


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The list of layers in a model: its longest."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len)


def encoder(shape: Shape, dtype: torch.dtype) -> Stack:
    """PyTorch's own layers with their defaults."""
    layers = (
        nn.TransformerEncoderLayer(shape.width, shape.heads, 4 * shape.width, shape.dropout, batch_first=True)
        for _ in range(shape.layers)
    )
    return Stack(nn.ModuleList(layers)).to(dtype)


class LlamaStack(nn.Module):
    """A Llama's layers and last norm, called as `Stack`."""

    def __init__(self, shape: Shape) -> None:
        from transformers import LlamaModel

        super().__init__()
        self.model = LlamaModel(llama_config(shape, attention_dropout=shape.dropout))

    def forward(self, x: Tensor, dy: Tensor) -> Tensor:
        return (self.model(inputs_embeds=x).last_hidden_state * dy).sum()


def llama(shape: Shape, dtype: torch.dtype) -> LlamaStack:
    """Llama's layers."""
    return LlamaStack(shape).to(dtype)


def llama_config(shape: Shape, **options: Any) -> Any:
    """Llama's proportions."""
    hidden = LLAMA.shape.dim_feedforward * shape.width // LLAMA.shape.d_model
    classes = max(shape.vocabulary, 1)
    return config(shape.layers, shape.width, hidden, shape.heads, classes, shape.tokens, **options)


def gpt2(shape: Shape, dtype: torch.dtype) -> Any:
    """GPT-2 with dropout everywhere."""
    from transformers import GPT2Config, GPT2LMHeadModel

    own = GPT2Config(
        vocab_size=shape.vocabulary,
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_positions=shape.tokens,
        resid_pdrop=shape.dropout,
        embd_pdrop=shape.dropout,
        attn_pdrop=shape.dropout,
        use_cache=False,
    )
    model: Any = GPT2LMHeadModel(own)
    return model.to(dtype)


def bert(shape: Shape, dtype: torch.dtype) -> Any:
    """BERT, whose norms come after."""
    from transformers import BertConfig, BertForMaskedLM

    own = BertConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=4 * shape.width,
        max_position_embeddings=shape.tokens,
        hidden_dropout_prob=shape.dropout,
        attention_probs_dropout_prob=shape.dropout,
    )
    model: Any = BertForMaskedLM(own)
    return model.to(dtype)


def with_adapters(base: Any, shape: Shape) -> Any:
    """A frozen model with adapters of rank 64 on every projection."""
    from peft import LoraConfig, get_peft_model

    # B is 0 in a fresh adapter, and with it the gradient of A: random, there is something to check.
    adapters = LoraConfig(
        r=64,
        lora_alpha=64,
        lora_dropout=shape.dropout,
        target_modules="all-linear",
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of an old name in transformers, which PEFT still reads
        return get_peft_model(base, adapters)


def lora(shape: Shape, dtype: torch.dtype) -> Any:
    """A frozen Llama with adapters."""
    from transformers import LlamaForCausalLM

    return with_adapters(LlamaForCausalLM(llama_config(shape)), shape).to(dtype)


def qlora(shape: Shape, dtype: torch.dtype) -> Any:
    """A Llama in 4 bits, with adapters in float32 as PEFT makes them."""
    from transformers import LlamaForCausalLM

    return with_adapters(in_4_bits(LlamaForCausalLM(llama_config(shape)), dtype), shape)


def dequantized(model: Any) -> Any:
    """`qlora`'s model in float64, with the weights that its products see."""
    exact = copy.deepcopy(model)
    exact.get_base_model().dequantize()
    for p, own in zip(exact.parameters(), model.parameters(), strict=True):
        p.requires_grad_(own.requires_grad)
    return exact.double()


def experts(shape: Shape, dtype: torch.dtype) -> Any:
    """A Qwen3-MoE: a token has four of sixteen experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads // 2,
        "head_dim": shape.width // shape.heads,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 3 * shape.width // 4,
        "use_cache": False,
    }
    own = Qwen3MoeConfig(**sizes)
    model: Any = Qwen3MoeForCausalLM(own)
    return model.to(dtype)


def expert_by_expert(model: Any) -> Any:
    """`experts`' model in float64, for which there are no grouped products."""
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")
    return exact


def vit(shape: Shape, dtype: torch.dtype) -> Any:
    """A vision transformer over patches of 16 x 16."""
    from transformers import ViTConfig, ViTForImageClassification

    own: Any = ViTConfig(
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=4 * shape.width,
        image_size=side_of(shape),
        hidden_dropout_prob=shape.dropout,
        attention_probs_dropout_prob=shape.dropout,
    )
    own.num_labels = shape.vocabulary
    model: Any = ViTForImageClassification(own)
    return model.to(dtype)


LORA = StepCase(
    "Llama with LoRA of rank 64 on every projection, loss and AdamW",
    Shape(4, 1024, 16, 4, 512, 8192, dropout=0.05),
    Shape(32, 4096, 32, 2, 4096, 128256, dropout=0.05),
    lora,
    text,
    causal=True,
)
CASES = {
    "encoder": StepCase(
        "`nn.TransformerEncoderLayer`s with PyTorch's defaults",
        Shape(6, 512, 8, 4, 512),
        Shape(24, 1024, 16, 8, 2048),
        encoder,
        rows,
        whole=False,
    ),
    "encoder-4096": StepCase(
        "`nn.TransformerEncoderLayer`s with PyTorch's defaults, a long sequence",
        Shape(4, 512, 8, 1, 4096),
        Shape(4, 4096, 32, 1, 32768),
        encoder,
        rows,
        whole=False,
    ),
    "llama": StepCase(
        "Llama layers without dropout",
        Shape(4, 1024, 16, 4, 512, dropout=0.0),
        Shape(4, 4096, 32, 2, 8192, dropout=0.0),
        llama,
        rows,
        whole=False,
    ),
    "llama-dropout": StepCase(
        "Llama layers with dropout in attention",
        Shape(4, 1024, 16, 4, 512),
        Shape(4, 4096, 32, 2, 8192),
        llama,
        rows,
        whole=False,
    ),
    "gpt2": StepCase(
        "GPT-2 with all its dropouts, loss and AdamW",
        Shape(6, 512, 8, 4, 512, 16384),
        Shape(24, 1024, 16, 8, 1024, 50257),
        gpt2,
        text,
        causal=True,
    ),
    "bert": StepCase(
        "BERT, loss and AdamW", Shape(6, 512, 8, 8, 256, 8192), Shape(24, 1024, 16, 32, 512, 30522), bert, text
    ),
    "lora": LORA,
    "qlora": replace(
        LORA, about=f"{LORA.about}, its base in 4 bits (nf4, nested scales)", make=qlora, exact=dequantized
    ),
    "experts": StepCase(
        "Qwen3-MoE of 16 experts, of which a token has four, loss and AdamW",
        Shape(4, 512, 8, 4, 512, 8192, dropout=0.0),
        Shape(8, 2048, 32, 4, 4096, 151936, dropout=0.0),
        experts,
        text,
        causal=True,
        exact=expert_by_expert,
        compared_in="float32",  # in bfloat16 a router's rounded logits choose other experts than float64's
    ),
    "vit": StepCase(
        "ViT, loss and AdamW", Shape(6, 512, 8, 16, 196, 1000), Shape(24, 1024, 16, 64, 196, 1000), vit, pictures
    ),
}

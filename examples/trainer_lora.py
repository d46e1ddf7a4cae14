"""Fine-tunes a Hugging Face model with LoRA through `Trainer`; its layers save their inputs only.

Without --model a small Llama with random weights is trained, so that the example runs anywhere.

    python examples/trainer_lora.py --steps 10
    python examples/trainer_lora.py --model Qwen/Qwen3-0.6B --text notes.txt --steps 100
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

import ckptfused

TOKENS = 64


class Stretches(torch.utils.data.Dataset):
    """A text's token ids in pieces of one length."""

    def __init__(self, ids: Tensor) -> None:
        self.pieces = ids[: len(ids) // TOKENS * TOKENS].view(-1, TOKENS)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def model_and_ids(name: str | None, text: bytes) -> tuple[Any, Tensor]:
    if name is None:
        sizes: Any = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        return LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)), torch.tensor(list(text))
    ids = AutoTokenizer.from_pretrained(name)(text.decode(), return_tensors="pt").input_ids[0]
    return AutoModelForCausalLM.from_pretrained(name), ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a model of the hub or a folder")
    parser.add_argument("--text", type=Path, default=Path(__file__))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", default="trainer_lora")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model, ids = model_and_ids(arguments.model, arguments.text.read_bytes())
    model = get_peft_model(model, LoraConfig(target_modules="all-linear", lora_dropout=0.05))
    print(ckptfused.convert(model))
    options = TrainingArguments(
        arguments.out, max_steps=arguments.steps, per_device_train_batch_size=4, logging_steps=5, report_to="none"
    )
    Trainer(model, options, train_dataset=Stretches(ids)).train()
    model.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()

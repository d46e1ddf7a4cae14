"""Eight small models of which a step is predicted and measured: of language, of vision, and of nobody's kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

Made = tuple[nn.Module, Any]
"""A model as it trains, and a batch."""


class BasicBlock(nn.Module):
    """ResNet's, as torchvision has it."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        same = stride == 1 and into == out
        self.downsample = (
            None if same else nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet18(nn.Module):
    """A ResNet-18 with its eight blocks in segments under `checkpoint_sequential`."""

    def __init__(self, width: int, segments: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        widths = [width * 2**stage for stage in range(4)]
        blocks = [
            BasicBlock(into if first else out, out, 2 if first and stage else 1)
            for stage, (into, out) in enumerate(zip((width, *widths), widths, strict=False))
            for first in (True, False)
        ]
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(widths[-1], 10)
        self.segments = segments

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = checkpoint_sequential(self.blocks, self.segments, self.stem(images), use_reentrant=False)
        return F.cross_entropy(self.fc(x.mean((2, 3))), labels)


class Mixer(nn.Module):
    """A model of nobody's: gated convolutions over time, a recurrent sum, two heads."""

    class Step(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm = nn.GroupNorm(4, width)
            self.conv = nn.Conv1d(width, 2 * width, 3, padding=2)
            self.out = nn.Linear(width, width)
            self.drop = nn.Dropout(0.1)

        def forward(self, x: Tensor) -> Tensor:
            value, gate = self.conv(self.norm(x.transpose(1, 2)))[..., : x.size(1)].chunk(2, 1)
            sums = torch.cumsum(value * torch.sigmoid(gate), -1) / x.size(1)
            return x + self.drop(self.out(sums.transpose(1, 2)))

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.steps = nn.ModuleList(Mixer.Step(width) for _ in range(layers))
        self.bytes, self.value = nn.Linear(width, 256), nn.Linear(width, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for step in self.steps:
            x = step(x)
        loss = F.cross_entropy(self.bytes(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        return loss + self.value(x).square().mean()


def _language(model: nn.Module, batch: int, tokens: int) -> Made:
    ids = torch.randint(0, 256, (batch, tokens))
    return model.train(), {"input_ids": ids, "labels": ids}


def models(scale: int = 1) -> dict[str, Callable[[], Made]]:
    """By name. scale: multiplies widths."""
    import transformers as hf

    width = 64 * scale
    decoder: dict[str, Any] = {
        **{"vocab_size": 512, "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 4},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False},
    }

    def llama() -> Made:
        return _language(hf.LlamaForCausalLM(hf.LlamaConfig(**decoder)), 2, 128)

    def lora() -> Made:
        from peft import LoraConfig, get_peft_model

        model: Any = hf.LlamaForCausalLM(hf.LlamaConfig(**decoder))
        return _language(get_peft_model(model, LoraConfig(r=8, target_modules="all-linear")), 2, 128)

    def bert() -> Made:
        sizes: dict[str, Any] = {"vocab_size": 512, "hidden_size": width, "intermediate_size": 4 * width}
        config = hf.BertConfig(**sizes, num_hidden_layers=4, num_attention_heads=4)
        return _language(hf.BertForMaskedLM(config), 2, 128)

    def gpt2() -> Made:
        config = hf.GPT2Config(vocab_size=512, n_embd=width, n_layer=4, n_head=4, n_positions=256, use_cache=False)
        return _language(hf.GPT2LMHeadModel(config), 2, 128)

    def vit() -> Made:
        sizes: dict[str, Any] = {
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "image_size": 64,
            "patch_size": 8,
        }
        config = hf.ViTConfig(
            **sizes, num_hidden_layers=4, num_attention_heads=4, id2label={i: str(i) for i in range(10)}
        )
        batch = {"pixel_values": torch.rand(4, 3, 64, 64), "labels": torch.randint(0, 10, (4,))}
        return hf.ViTForImageClassification(config).train(), batch

    def mixtral() -> Made:
        config = hf.MixtralConfig(**decoder, num_local_experts=4, num_experts_per_tok=2)
        return _language(hf.MixtralForCausalLM(config), 2, 128)

    def resnet() -> Made:
        return ResNet18(width // 4).train(), (torch.rand(8, 3, 64, 64), torch.randint(0, 10, (8,)))

    def mixer() -> Made:
        return Mixer(width, 4).train(), torch.randint(0, 256, (4, 128))

    return {
        **{"llama": llama, "llama-lora": lora, "bert": bert, "gpt2": gpt2, "vit": vit, "mixtral": mixtral},
        **{"resnet18-segments": resnet, "custom": mixer},
    }

"""Fine-tuning a Llama-style model through Hugging Face's `Trainer`, with and without `ckptfused.convert`.

Three runs from the same weights over the same data: unconverted, unconverted with another number of threads (whose
sums round in another order), and converted. The converted curve should stray from the unconverted one no further than
the number of threads makes it stray: exit status 1 if it does. Needs transformers and accelerate.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

import ckptfused
from benchmarks.benchmark import Benchmark, Column, Goal, Rows, Sizes, number
from ckptfused.cli.demo import data

TOKENS, BATCH = 128, 4
SHOWN = range(0, 100, 10)


@dataclass(frozen=True, kw_only=True)
class CurveSizes(Sizes):
    """How long, and the other number of threads: powers of two may give equal bits."""

    steps: int = 100
    other_threads: int = 7

    @property
    def other(self) -> str:
        return f"unconverted, {self.other_threads} threads"


class Text(Dataset[dict[str, Tensor]]):
    """Windows of text, byte by byte."""

    def __init__(self, windows: int, seed: int) -> None:
        self.corpus = data.load_corpus(None, windows * TOKENS)
        generator = torch.Generator().manual_seed(seed)
        self.starts = torch.randint(0, len(self.corpus) - TOKENS, (windows,), generator=generator)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = int(self.starts[index])
        ids = self.corpus[start : start + TOKENS].long()
        return {"input_ids": ids, "labels": ids}


def model(seed: int) -> Any:
    """A Llama of about 15 M parameters in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=8,
            num_attention_heads=6,
            num_key_value_heads=6,
            max_position_embeddings=TOKENS,
        )
    )


def train(steps: int, threads: int, seed: int, convert: bool) -> list[float]:
    """The loss of every step."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    torch.set_num_threads(threads)
    net = model(seed)
    if convert:
        report = ckptfused.convert(net)
        assert report.fused == len(report.layers) == 8, str(report)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            learning_rate=3e-4,
            lr_scheduler_type="cosine",
            warmup_steps=10,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            seed=seed,
            disable_tqdm=True,
        )
        trainer = Trainer(model=net, args=arguments, train_dataset=Text(steps * BATCH, seed))
        trainer.remove_callback(PrinterCallback)
        losses: list[float] = []  # the log rounds them
        net.register_forward_hook(lambda module, args, output: losses.append(output.loss.item()))
        trainer.train()
    return losses


def furthest(a: list[float], b: list[float]) -> float:
    """The largest difference between two curves."""
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def figures(sizes: CurveSizes, steps: Any) -> Rows:
    """The three curves, and how far each strays from the first."""
    threads = torch.get_num_threads()
    runs = {"unconverted": (threads, False), sizes.other: (sizes.other_threads, False), "converted": (threads, True)}
    curves = {name: train(sizes.steps, count, sizes.seed, convert) for name, (count, convert) in runs.items()}
    torch.set_num_threads(threads)
    plain = curves["unconverted"]
    return {name: {"furthest": furthest(plain, curve), "losses": curve} for name, curve in curves.items()}


def loss_at(i: int) -> Column:
    return Column(f"step {i + 1}", lambda row, rows: f"{row['losses'][i]:.7f}" if i < len(row["losses"]) else "")


BENCHMARK = Benchmark(
    name="trainer-curves",
    doc=__doc__,
    sizes=CurveSizes(),
    figures=figures,
    columns=(
        number("largest difference", "furthest", ".2e"),
        *map(loss_at, SHOWN),
        Column("last", lambda row, rows: f"{row['losses'][-1]:.7f}"),
    ),
    goals=lambda sizes: (Goal("converted", sizes.other, 1.0, "furthest", "largest difference"),),
    must_meet=True,
    shape=lambda sizes, rows: f"14.4 M parameters, float32, {sizes.steps} steps; losses.",
    threads=2,
)

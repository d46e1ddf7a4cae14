"""Fine-tunes a Llama-style model through Hugging Face's `Trainer`, with and without `ckptfused.convert`.

Three runs from the same weights over the same data: unconverted, unconverted with another number of threads (whose
sums round in another order), and converted. The converted curve should stray from the unconverted one no further than
the number of threads makes it stray: exit status 1 if it does. Needs transformers and accelerate.

    python benchmarks/trainer_curves.py
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from torch.utils.data import Dataset

import ckptfused
from benchmarks import environment
from benchmarks.commands import RESULTS
from ckptfused.cli.demo import data

TOKENS, BATCH = 128, 4


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
    """About 15 M parameters in float32."""
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, nargs=2, default=(2, 7), help="powers of two may give equal bits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    first, second = chosen.threads
    curves = {
        f"unconverted, {first} threads": train(chosen.steps, first, chosen.seed, convert=False),
        f"unconverted, {second} threads": train(chosen.steps, second, chosen.seed, convert=False),
        f"converted, {first} threads": train(chosen.steps, first, chosen.seed, convert=True),
    }
    plain, other, ours = curves.values()
    size = sum(p.numel() for p in model(chosen.seed).parameters())
    lines = [f"# Fine-tuning through Trainer, {size / 1e6:.1f} M parameters, float32", ""]
    lines += ["| step | " + " | ".join(curves) + " |", "|---" * 4 + "|"]
    shown = sorted({*range(0, chosen.steps, 10), chosen.steps - 1})
    lines += [f"| {i + 1} | {plain[i]:.7f} | {other[i]:.7f} | {ours[i]:.7f} |" for i in shown]
    yardstick, found = furthest(plain, other), furthest(plain, ours)
    lines += [
        "",
        f"Largest difference over {chosen.steps} steps: {yardstick:.2e} between the numbers of threads, "
        f"{found:.2e} between unconverted and converted.",
        "",
    ]
    print("\n".join(lines))
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / "trainer-curves.md").write_text("\n".join(lines))
    result = {"curves": curves, "threads": yardstick, "converted": found, "environment": environment.describe()}
    (chosen.out / "trainer-curves.json").write_text(json.dumps(result, indent=2) + "\n")
    return int(found > yardstick)


if __name__ == "__main__":
    sys.exit(main())

"""Trains a small decoder on this file's own bytes, saves a checkpoint, and resumes from it.

The checkpoint holds the random state, so that a run that was stopped and resumed ends with the same weights, bit for
bit, as one that never stopped, dropout included.

    python examples/train.py --steps 20 --save run.pt
    python examples/train.py --steps 40 --save run.pt --resume
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ckptfused import FusedCheckpointBlock

WIDTH, TOKENS, BATCH = 64, 64, 8


class Decoder(nn.Module):
    """A byte-level language model whose layers save their inputs only."""

    def __init__(self, keep: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.layers = nn.Sequential(*(FusedCheckpointBlock.llama(WIDTH, 4, dropout=0.1, keep=keep) for _ in range(2)))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens)))


def batch(text: Tensor) -> Tensor:
    """Random stretches of the text, one byte longer than the model reads."""
    starts = torch.randint(len(text) - TOKENS, (BATCH,)).tolist()
    return torch.stack([text[start : start + TOKENS + 1] for start in starts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="steps of the whole run, those before a resume included")
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--resume", action="store_true", help="go on from the file named by --save")
    parser.add_argument("--keep", default="inputs", help="see docs/keep.md; the weights do not depend on it")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    model = Decoder(arguments.keep)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = 0
    if arguments.resume:
        state = torch.load(arguments.save)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])  # on a GPU torch.cuda.set_rng_state_all too
        first = state["step"]
    for step in range(first, arguments.steps):
        tokens = batch(text)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            print(f"step {step + 1}: {loss.item():.3f} nats a byte")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": arguments.steps}
    torch.save({**state, "rng": torch.get_rng_state()}, arguments.save)


if __name__ == "__main__":
    main()

"""Real text for the demo: the Python standard library's own source, or a file."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from ckptfused.cli.errors import CommandError
from ckptfused.sizes import counted

CORPUS_BYTES = 8 << 20


def load_corpus(path: Path | None, minimum: int) -> Tensor:
    """The corpus as uint8 [bytes]; at least ``minimum`` of them."""
    if path is None:
        origin = Path(sysconfig.get_path("stdlib"))
        text, size = [], 0
        for file in sorted(origin.glob("**/*.py")):
            if "site-packages" in file.parts or "test" in file.parts or size >= CORPUS_BYTES:
                continue
            text.append(file.read_bytes())
            size += len(text[-1])
        content = b"\n".join(text)[:CORPUS_BYTES]
    else:
        origin = path
        try:
            content = path.read_bytes()
        except OSError as error:
            raise CommandError(f"--data: expected a readable file, got {path} ({error.strerror})") from error
    if len(content) < minimum:
        raise CommandError(
            f"the text in {origin} has {counted(len(content), 'byte')}; one batch needs at least {minimum:,}"
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def entropy(corpus: Tensor) -> float:
    """Nats a byte that the frequencies of bytes alone cost: what a model has to beat."""
    share = torch.bincount(corpus, minlength=256).double() / len(corpus)
    return -float(torch.special.xlogy(share, share).sum())


def batch(corpus: Tensor, step: int, size: int, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and next-byte targets, int64 [size, tokens]: a pure function of (corpus, step, seed)."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(corpus) - tokens, (size,), generator=generator)
    window = corpus[starts[:, None] + torch.arange(tokens + 1)].long()
    return window[:, :-1], window[:, 1:]

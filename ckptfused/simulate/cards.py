"""Graphics cards by name: their memory, and their rates as datasheets have them. No PyTorch.

Rates are of tensor cores without sparsity and of memory at its peak. Products in float32 go without TensorFloat-32, as
PyTorch has it by default. Attention is at the published rates of its kernels: 2.08 ms and 5.33 ms for causal attention
of 2 × 8192 tokens, 32 heads of 128 (Shah et al. 2024, FlashAttention-3; cuDNN) on Hopper; FlashAttention-2 (Dao 2023)
on Ampere and Ada; on Blackwell the share of the products' rate that it has on Hopper. Tiles of queries are
FlashAttention-2's everywhere, which takes 12.0 ms for the 7.41 above.

Sources: NVIDIA's datasheets of the HGX B200, H200, H100 (SXM), A100 (SXM), L40S, and the Ada whitepaper for the RTX
4090.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckptfused.spec.checks import nearest

GIB = 2**30


@dataclass(frozen=True)
class Card:
    """Rates in TFLOP/s, the bandwidth in TB/s, the link to the host in GB/s."""

    name: str
    memory: float
    """GiB that PyTorch finds of it, rounded down."""
    half: float
    single: float
    bandwidth: float
    multiprocessors: int
    attention: float
    link: float
    tiled: float = 1.0
    """Share of attention's rate by tiles of queries."""
    also: tuple[str, ...] = ()
    """Other names, as `_plain` has them."""
    capability: tuple[int, int] = (9, 0)
    """NVIDIA's compute capability."""

    @property
    def usable(self) -> int:
        """Bytes of it that a step may need."""
        return usable(int(self.memory * GIB))


CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        Card("h200", 139, 989, 67, 4.8, 132, 520, 55, 0.62),
        Card("h100", 79, 989, 67, 3.35, 132, 520, 55, 0.62, ("h10080", "h100sxm")),
        Card("a100-80", 79, 312, 19.5, 2.039, 108, 200, 25, also=("a100", "a100sxm", "a100sxm480"), capability=(8, 0)),
        Card("a100-40", 39, 312, 19.5, 1.555, 108, 200, 25, also=("a100sxm440",), capability=(8, 0)),
        Card("l40s", 44, 362, 91.6, 0.864, 142, 200, 25, capability=(8, 9)),
        Card("rtx4090", 23.5, 165.2, 82.6, 1.008, 128, 130, 25, also=("4090",), capability=(8, 9)),
        Card("b200", 178, 2250, 75, 8.0, 148, 1180, 55, 0.62, capability=(10, 0)),
    )
}


def usable(memory: int) -> int:
    """What a step may need of a card's bytes: a twentieth, at least 1 GiB, is left for the CUDA context, workspaces of
    libraries and fragmentation, which predictions do not count."""
    return memory - max(memory // 20, GIB)


def fitting(peak: int) -> list[str]:
    """The cards on which a step that needs so many bytes fits, the smallest first."""
    return [card.name for card in sorted(CARDS.values(), key=lambda card: card.memory) if peak <= card.usable]


def device_name(text: str) -> str:
    """The name in `CARDS` of what people call a card, such as "A100" or "RTX 4090"; "cpu"; or PyTorch's "cuda".

    **Raises** `ValueError` for another.
    """
    if re.fullmatch(r"cuda(:\d+)?", text.strip().lower()):
        return text.strip().lower()
    names = {_plain(name): card.name for card in CARDS.values() for name in (card.name, *card.also)} | {"cpu": "cpu"}
    found = names.get(_plain(text))
    if found is None:
        raise ValueError(
            f"expected one of {', '.join(CARDS)}, cuda (the GPU at hand), cpu, got {text!r}"
            f"{nearest(text, (*CARDS, 'cpu'))}"
        )
    return found


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|(?<=\d)gb|hbm\w*|[^a-z0-9]", "", name.lower())

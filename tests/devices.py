"""The devices that tests run on: what the block promises, it promises on each of them."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
on_devices = pytest.mark.parametrize("device", ["cpu", CUDA])


def why_no_gpu() -> str:
    """Why tests with the gpu marker cannot run here; empty where they can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    from ckptfused import build_info

    return "" if build_info()["cuda_architectures"] else "ckptfused was built for the CPU alone"


def repeatable(device: str) -> None:
    """Ask PyTorch for kernels that give the same bits twice: on a GPU the default ones of attention and of matrix
    products need not. The library's promises of equal bits are made under this setting there."""
    if device == "cuda":
        torch.use_deterministic_algorithms(True)


def generator_state(device: str) -> Tensor:
    """The state of PyTorch's default generator of a device."""
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()


def let_go() -> None:
    """Frees, on a GPU, what earlier tests left in circles, and a step's last gradients, which autograd's thread holds
    until it has another's."""
    gc.collect()
    torch.ones((), device="cuda", requires_grad=True).sum().backward()

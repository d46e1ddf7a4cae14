"""Trains a sharded decoder on two processes with FSDP2; each layer saves its input only.

    torchrun --nproc-per-node 2 examples/fsdp2.py --steps 10

It runs on CPUs with gloo, and on GPUs with NCCL where there are enough of them.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckptfused

WIDTH, TOKENS, BATCH = 64, 32, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = "cuda" if torch.cuda.device_count() >= ranks else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    mesh = init_device_mesh(device, (ranks,))

    torch.manual_seed(0)  # the same weights on every rank
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device)
    # process_group=True compares the ranks: all have to convert alike.
    report = ckptfused.convert(model, process_group=True)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if rank == 0:
        print(report)

    torch.manual_seed(1 + rank)  # other data and other dropout on every rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(arguments.steps):
        x = torch.randn(BATCH, TOKENS, WIDTH, device=device)
        loss = (model(x) - x.cumsum(1) / WIDTH).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.SUM)
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {mean.item() / ranks:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

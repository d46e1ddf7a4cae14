"""Trains one variant in this process and reports it as JSON lines on stdout.

``{"step": i, "loss": x, "seconds": t}`` for each step, then ``{"saved": bytes, "peak": bytes, "text": text}``.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ckptfused.cli.demo import data
from ckptfused.cli.demo.job import REORDERED, Job
from ckptfused.cli.models import VARIANTS, Decoder, PlainBlock, Variant, initialise, plain_layers, variant_layers

TEMPERATURE = 0.6  # of the text that a model writes: nearer to its best guess than what it was trained on


def built_decoder(job: Job) -> Decoder:
    """The job's model; equal weights for every variant, by construction."""
    dtype = getattr(torch, job.dtype)
    plain = plain_layers(job.shape, seed=job.seed)
    decoder = Decoder(job.shape, nn.ModuleList())
    initialise(decoder, job.shape.layers, job.seed + 1)
    if job.variant == REORDERED:
        reorder(decoder, plain, job.seed)
    variant: Variant = next((name for name in VARIANTS if name == job.variant), "plain")
    decoder.to(dtype)
    decoder.layers = variant_layers(variant, plain.to(dtype), job.shape)
    return decoder


def reorder(decoder: Decoder, plain: nn.ModuleList, seed: int) -> None:
    """Renumbers model channels and hidden units: the same function in exact arithmetic, other sums in floating point.

    How far this model's loss curve strays from the plain one is what rounding alone explains.
    """
    generator = torch.Generator().manual_seed(seed + 2)
    channels = torch.randperm(decoder.embedding.embedding_dim, generator=generator)
    decoder.embedding.weight.data = decoder.embedding.weight.data[:, channels]
    decoder.head.weight.data = decoder.head.weight.data[:, channels]
    for block in plain:
        assert isinstance(block, PlainBlock)
        hidden = torch.randperm(block.linear2.in_features, generator=generator)
        rows = torch.cat((hidden, hidden + len(hidden)))
        block.self_attn.in_proj_weight.data = block.self_attn.in_proj_weight.data[:, channels]
        block.self_attn.out_proj.weight.data = block.self_attn.out_proj.weight.data[channels]
        block.linear1.weight.data = block.linear1.weight.data[rows][:, channels]
        block.linear2.weight.data = block.linear2.weight.data[channels][:, hidden]


def autograd_bytes(model: nn.Module, tokens: Tensor, targets: Tensor) -> int:
    """Bytes that autograd holds between forward and backward: unique storages that are not parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, int] = {}
    held: list[Tensor] = []  # keeps each storage alive, so that no address counts for two

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens, targets)
    del loss
    return sum(found.values())


def resident_bytes() -> int:
    """Resident memory now (Linux); elsewhere the peak so far."""
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * resource.getpagesize()
    return resident_peak_bytes()


def baseline_bytes(device: torch.device) -> int:
    """Memory in use before the first step; of a GPU what its tensors take."""
    if device.type == "cpu":
        return resident_bytes()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak_bytes(device: torch.device) -> int:
    return resident_peak_bytes() if device.type == "cpu" else torch.cuda.max_memory_allocated(device)


def resident_peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def train(job: Job) -> None:
    torch.set_num_threads(job.threads)
    device = torch.device(job.device)
    if device.type == "cuda":  # two runs of one variant must agree to the bit before two variants can
        torch.use_deterministic_algorithms(True)
    corpus = data.load_corpus(Path(job.data) if job.data else None, minimum=2 * job.tokens)

    def batch(step: int, sequences: int, tokens: int) -> tuple[Tensor, Tensor]:
        inputs, targets = data.batch(corpus, step, sequences, tokens, job.seed)
        return inputs.to(device), targets.to(device)

    model = built_decoder(job).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1)
    # A step on four bytes brings optimizer state and library buffers into the baseline. With lr 0 it moves no
    # weight; its moments are cleared.
    model(*batch(0, 1, 4)).backward()
    optimizer.step()
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()
    torch.manual_seed(job.seed)
    baseline = baseline_bytes(device)

    for step in range(job.steps):
        tokens, targets = batch(step, job.batch, job.tokens)
        for group in optimizer.param_groups:
            group["lr"] = job.learning_rate * schedule(step, job.steps)
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        value = loss.item()
        del loss
        emit({"step": step, "loss": value, "seconds": time.perf_counter() - start})
    peak = peak_bytes(device) - baseline
    saved = autograd_bytes(model, *batch(0, job.batch, job.tokens))
    emit({"saved": saved, "peak": peak, "text": write(model, job.tokens, job.seed, device)})


def schedule(step: int, steps: int) -> float:
    """The share of the learning rate: up over ten steps, then down along a cosine."""
    return min(1.0, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * step / steps))


@torch.no_grad()
def write(model: Decoder, tokens: int, seed: int, device: torch.device, length: int = 240) -> str:
    """Text that the model draws byte by byte, the same for equal weights, as far as it is printable ASCII."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    text = [ord("\n")]
    for _ in range(length):
        scores = model.logits(torch.tensor([text[-tokens:]], device=device))[0, -1].float().cpu()
        text.append(int(torch.multinomial((scores / TEMPERATURE).softmax(0), 1, generator=generator)))
    return "".join(chr(byte) if 32 <= byte < 127 or byte == ord("\n") else "?" for byte in text).strip()


def emit(record: dict[str, Any]) -> None:
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    train(Job.from_json(sys.argv[1]))

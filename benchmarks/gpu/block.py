"""One Llama-3-8B block on a GPU, forward and backward: what each preset costs against keeping all and against eager.

    python -m benchmarks.gpu.block --seconds 40

Batch 2 x 8192, bfloat16, no dropout, every gradient; gradients are checked first, at these sizes. "eager" is the layer
as Hugging Face's transformers writes it, with the attention kernel that PyTorch chooses; "pinned", with the one that
ckptfused chooses (CKPTFUSED_ATTENTION overrides that). "eager fused" is the one of ckptfused/cli/models.py, with
PyTorch's own fused norm and joint products. The ideal times are computed for the GPU at hand: benchmarks/gpu/goals.py.
"""

from __future__ import annotations

import contextlib
import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts: for the check of equal bits

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.baselines import HuggingFaceBlock
from benchmarks.cases import LLAMA_3_8B, TINY, Case
from benchmarks.checks import check_gradients
from benchmarks.gpu import goals
from benchmarks.gpu.timing import Clock, Times, arguments, path_of, write
from benchmarks.tables import goal_table, table
from ckptfused import FusedCheckpointBlock, cost
from ckptfused.cli.models import LayerShape, PlainBlock, plain_layers, variant_layers
from ckptfused.spec import BlockSpec

KEEPS = ("all", "attention+mid+qkv", "attention+mid", "attention", "inputs")


def attention_kernel(block: FusedCheckpointBlock, x: Tensor) -> str:
    """The kernel that ckptfused uses: flash, cudnn, triton, or cpu."""
    if not x.is_cuda:
        return "cpu"
    from ckptfused.triton.backend import AttentionShape as Problem
    from ckptfused.triton.backend import attention_backend

    attn = block.spec(x.dtype).attn
    assert attn is not None
    problem = Problem.of_spec(attn, x.dtype, x.shape[0], x.shape[1])
    return attention_backend(problem, torch.cuda.get_device_capability(x.device))[0]


def same_kernel(name: str) -> contextlib.AbstractContextManager[None]:
    """Makes eager use the attention kernel of that name, where PyTorch has it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    return sdpa_kernel(backends[name]) if name in backends else contextlib.nullcontext()


Step = Callable[[], object]


class Variants:
    """One step of each variant: y and the gradients of x and of every weight, freed at once."""

    def __init__(self, case: Case, device: str) -> None:
        plain = plain_layers(case.shape, dtype=torch.bfloat16, seed=0, device=device)
        fused: FusedCheckpointBlock = variant_layers("ckptfused all", plain, case.shape)[0]  # type: ignore[assignment]
        eager_fused: PlainBlock = plain[0]  # type: ignore[assignment]
        eager = HuggingFaceBlock(eager_fused)
        generator = torch.Generator(device).manual_seed(1)
        size = (case.batch, case.tokens, case.shape.d_model)
        self.x, self.dy = (torch.randn(size, generator=generator, device=device).bfloat16() for _ in range(2))
        self.x.requires_grad_()
        self.fused = fused
        self.kernel = attention_kernel(fused, self.x)
        self.forwards: dict[str, tuple[Callable[[], Tensor], list[nn.Parameter]]] = {}
        for keep in KEEPS:
            self.forwards[f"ckptfused {keep}"] = (lambda keep=keep: self._fused(keep)), list(fused.parameters())  # type: ignore[misc]
        for name, module, weights in (
            ("eager", eager, eager.weights()),
            ("eager pinned", eager, eager.weights()),
            ("eager fused", eager_fused, list(eager_fused.parameters())),
        ):
            self.forwards[name] = (lambda module=module: module(self.x)), weights  # type: ignore[misc]
            again = lambda module=module: checkpoint(module, self.x, use_reentrant=False)  # type: ignore[misc] # noqa: E731
            self.forwards[name.replace("eager", "eager checkpoint", 1)] = again, weights

    def _fused(self, keep: str) -> Tensor:
        self.fused.keep = keep
        return self.fused(self.x)

    def step(self, name: str) -> tuple[Tensor, ...]:
        forward, weights = self.forwards[name]
        with same_kernel(self.kernel if "pinned" in name else ""):
            return torch.autograd.grad(forward(), [self.x, *weights], self.dy)

    def memory(self, name: str) -> dict[str, int]:
        """Bytes held between forward and backward (x included, y left out), and the peak of the step above x and dy."""
        forward, weights = self.forwards[name]
        self.step(name)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with same_kernel(self.kernel if "pinned" in name else ""):
            y = forward()
            held = torch.cuda.memory_allocated() - before - y.nbytes + self.x.nbytes
            torch.autograd.grad(y, [self.x, *weights], self.dy)
        return {"saved": held, "peak": torch.cuda.max_memory_allocated() - before}

    def predicted(self, keep: str) -> int:
        """Bytes saved, by cost.py."""
        self.fused.keep = keep
        spec = BlockSpec.parse(self.fused.prepare(self.x).text)
        batch, length, width = self.x.shape
        return cost.saved_bytes(spec, batch, length, width, self.x.dtype)


def tried(variants: Variants) -> dict[str, str]:
    """One step of each; the errors of those that do not run here."""
    failed = {}
    for name in variants.forwards:
        try:
            variants.step(name)
        except RuntimeError as error:
            failed[name] = str(error).splitlines()[0]
            print(f"{name}: {failed[name]}", flush=True)
    return failed


def predicted(case: Case, device: str) -> goals.Ideals:
    """The ideal times; none, and why, where they cannot be computed: that is no reason to measure nothing."""
    try:
        return goals.ideals(case, goals.device_at_hand(device))
    except (RuntimeError, ValueError) as error:
        print(f"no ideal times: {error}", flush=True)
        return goals.Ideals("not known", {})


def result_of(
    case: Case, variants: Variants, ideal: goals.Ideals, times: dict[str, Times], memory: dict[str, dict[str, int]]
) -> dict[str, Any]:
    return {
        "shape": vars(case.shape),
        "batch": case.batch,
        "tokens": case.tokens,
        "dtype": "bfloat16",
        "attention kernel": variants.kernel,
        "rates of": ideal.device,
        "milliseconds": {name: vars(value) for name, value in times.items()},
        "ideal milliseconds": {name: round(value, 2) for name, value in ideal.milliseconds.items()},
        "bytes": memory,
        "saved bytes predicted": {f"ckptfused {keep}": variants.predicted(keep) for keep in KEEPS},
        "goals": goals.of(times, ideal),
    }


def show(result: dict[str, Any], ideal: goals.Ideals, checks: list[str]) -> None:
    rows: list[list[object]] = []
    for name, t in result["milliseconds"].items():
        best = f"{ideal.milliseconds[name]:.1f}" if name in ideal.milliseconds else ""
        used = result["bytes"].get(name, {})
        sizes = [f"{used[key] / 2**20:.0f}" if used else "" for key in ("saved", "peak")]
        rows.append([name, *(f"{t[key]:.2f}" for key in ("median", "p20", "p80")), best, *sizes])
    print(f"attention kernel: {result['attention kernel']}; {'; '.join(checks)}")
    print(table(["variant", "ms", "p20", "p80", f"ideal ms ({ideal.device})", "saved MiB", "peak MiB"], rows))
    print(goal_table(result["goals"]))
    for warning in goals.too_good(result["goals"]):
        print(warning)


def main() -> None:
    options: Namespace = arguments(__doc__)
    case = TINY if options.tiny else LLAMA_3_8B
    torch.manual_seed(0)
    # With dropout, equal bits are something to check.
    dropping = Case(case.name, LayerShape(**{**vars(case.shape), "residual_dropout": 0.1}), case.batch, case.tokens)
    checks = check_gradients(dropping, torch.bfloat16, 0, options.device, whole=True)
    print("\n".join(checks), flush=True)
    variants, clock = Variants(case, options.device), Clock(options.device)
    failed = tried(variants)
    names = [name for name in variants.forwards if name not in failed]
    ideal = predicted(case, options.device)
    memory = {name: variants.memory(name) for name in names} if options.device == "cuda" else {}

    def save(times: dict[str, Times]) -> dict[str, Any]:
        result = result_of(case, variants, ideal, times, memory) | {"checks": checks, "failed": failed}
        write(options, "block", result)
        return result

    calls = {name: lambda name=name: variants.step(name) for name in names}  # type: ignore[misc]
    result = save(clock.compare(calls, options.seconds, after=save))
    show(result, ideal, checks)
    print(f"written: {path_of(options, 'block')}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

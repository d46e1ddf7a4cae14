"""One Llama-3-8B block on a GPU, forward and backward: what each preset costs against keeping all and against eager.

    python benchmarks/gpu_block.py --seconds 40

Batch 2 x 8192, bfloat16, no dropout, every gradient. Gradients are checked first, on fewer tokens. All variants use the
attention kernel that ckptfused chooses (CKPTFUSED_ATTENTION overrides it). "eager" is the layer as Hugging Face's
transformers writes it; "eager fused" the one of ckptfused/cli/models.py, with PyTorch's own fused norm and joint
products. The ideal times are those of the cost derivation, from 790 TFLOP/s of cuBLAS and 4.3 TB/s of copy.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts: for the check of equal bits
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.baselines import HuggingFaceBlock
from benchmarks.cases import Case
from benchmarks.checks import check_gradients
from benchmarks.gpu_timing import Clock, Goal, Times, arguments, write
from benchmarks.tables import goal_table, table
from ckptfused import FusedCheckpointBlock, cost
from ckptfused.cli.models import PlainBlock, Shape, plain_layers, variant_layers
from ckptfused.spec import BlockSpec

LLAMA = Case("llama-3-8b", Shape(4096, 32, 14336, layers=1, num_kv_heads=8, rope_theta=5e5), batch=2, tokens=8192)
TINY = Case("tiny", Shape(64, 4, 96, layers=1, num_kv_heads=2), batch=2, tokens=32)
KEEPS = ("all", "attention+mid", "attention", "inputs")
# Milliseconds with cuDNN's attention and with flash's.
IDEAL = {
    "ckptfused all": (36.3, 40.9),
    "ckptfused attention+mid": (42.3, 46.8),
    "ckptfused attention": (43.0, 47.6),
    "ckptfused inputs": (45.1, 50.9),
    "eager": (41.6, 46.1),
    "eager checkpoint": (52.5, 58.3),
}
# Time of the first over that of the second: the limit, and whether it is to be reached from above.
GOALS = (
    ("ckptfused inputs", "ckptfused all", 1.28, False),
    ("ckptfused attention+mid", "ckptfused all", 1.20, False),
    ("eager", "ckptfused all", 1.08, True),
    ("eager", "ckptfused attention+mid", 1.00, True),
    ("eager checkpoint", "ckptfused inputs", 1.10, True),
    ("eager checkpoint", "ckptfused attention+mid", 1.15, True),
)


def attention_kernel(block: FusedCheckpointBlock, x: Tensor) -> str:
    """The kernel that ckptfused uses: flash, cudnn, triton, or cpu."""
    if not x.is_cuda:
        return "cpu"
    from ckptfused.triton.backend import Shape as Problem
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
        plain = plain_layers(case.shape, dtype=torch.bfloat16, seed=0)
        fused: FusedCheckpointBlock = variant_layers("ckptfused all", plain, case.shape).to(device)[0]  # type: ignore[assignment]
        eager_fused: PlainBlock = plain.to(device)[0]  # type: ignore[assignment]
        eager = HuggingFaceBlock(eager_fused)
        generator = torch.Generator().manual_seed(1)
        size = (case.batch, case.tokens, case.shape.d_model)
        self.x, self.dy = (torch.randn(size, generator=generator).to(device, torch.bfloat16) for _ in range(2))
        self.x.requires_grad_()
        self.fused = fused
        self.kernel = attention_kernel(fused, self.x)
        self.forwards: dict[str, tuple[Callable[[], Tensor], list[nn.Parameter]]] = {}
        for keep in KEEPS:
            self.forwards[f"ckptfused {keep}"] = (lambda keep=keep: self._fused(keep)), list(fused.parameters())  # type: ignore[misc]
        for name, module, weights in (
            ("eager", eager, eager.weights()),
            ("eager fused", eager_fused, list(eager_fused.parameters())),
        ):
            self.forwards[name] = (lambda module=module: module(self.x)), weights  # type: ignore[misc]
            again = lambda module=module: checkpoint(module, self.x, use_reentrant=False)  # type: ignore[misc] # noqa: E731
            self.forwards[f"{name} checkpoint"] = again, weights

    def _fused(self, keep: str) -> Tensor:
        self.fused.keep = keep
        return self.fused(self.x)

    def step(self, name: str) -> tuple[Tensor, ...]:
        forward, weights = self.forwards[name]
        with same_kernel(self.kernel):
            return torch.autograd.grad(forward(), [self.x, *weights], self.dy)

    def memory(self, name: str) -> dict[str, int]:
        """Bytes held between forward and backward (x included, y left out), and the peak of the step above x and dy."""
        forward, weights = self.forwards[name]
        self.step(name)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with same_kernel(self.kernel):
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


def goals_of(times: dict[str, Times], kernel: str) -> list[dict[str, Any]]:
    """The goals of those that were measured."""
    column = 0 if kernel == "cudnn" else 1
    goals = []
    for first, second, limit, at_least in GOALS:
        if first in times and second in times:
            ideal = IDEAL[first][column] / IDEAL[second][column]
            value = times[first].median / times[second].median
            goals.append(Goal(f"{first} / {second}", value, limit, at_least, round(ideal, 3)).row())
    return goals


def main() -> None:
    options = arguments(__doc__)
    case = TINY if options.tiny else LLAMA
    torch.manual_seed(0)
    # The check takes a quarter of the tokens; with dropout, equal bits are something to check.
    small = Case(case.name, Shape(**{**vars(case.shape), "residual_dropout": 0.1}), 1, min(case.tokens, 4096))
    checks = check_gradients(small, torch.bfloat16, 0, options.device)
    variants, clock = Variants(case, options.device), Clock(options.device)
    names, failed = [], {}
    for name in variants.forwards:
        try:
            variants.step(name)
            names.append(name)
        except RuntimeError as error:
            failed[name] = str(error).splitlines()[0]
            print(f"{name}: {failed[name]}", flush=True)
    times = clock.compare({name: lambda name=name: variants.step(name) for name in names}, options.seconds)  # type: ignore[misc]
    memory: dict[str, dict[str, int]] = {}
    predicted = {f"ckptfused {keep}": variants.predicted(keep) for keep in KEEPS}
    goals = goals_of(times, variants.kernel)
    column = 0 if variants.kernel == "cudnn" else 1
    case_name = "block" if not os.environ.get("CKPTFUSED_ATTENTION") else f"block-{variants.kernel}"
    result = {
        "shape": vars(case.shape),
        "batch": case.batch,
        "tokens": case.tokens,
        "dtype": "bfloat16",
        "attention kernel": variants.kernel,
        "checks": checks,
        "milliseconds": {name: vars(value) for name, value in times.items()},
        "ideal milliseconds": {name: value[column] for name, value in IDEAL.items()},
        "bytes": memory,
        "saved bytes predicted": predicted,
        "failed": failed,
        "goals": goals,
    }
    path = write(options, case_name, result)  # the times stay if time runs out
    if options.device == "cuda":
        memory |= {name: variants.memory(name) for name in names}
        write(options, case_name, result)
    rows: list[list[object]] = []
    for name, t in times.items():
        ideal = f"{IDEAL[name][column]:.1f}" if name in IDEAL else ""
        used = memory.get(name, {})
        sizes = [f"{used[key] / 2**20:.0f}" if used else "" for key in ("saved", "peak")]
        rows.append([name, f"{t.median:.2f}", f"{t.p20:.2f}", f"{t.p80:.2f}", ideal, *sizes])
    print(f"attention kernel: {variants.kernel}; {'; '.join(checks)}")
    print(table(["variant", "ms", "p20", "p80", "ideal ms", "saved MiB", "peak MiB"], rows))
    print(goal_table(goals))
    for goal in goals:
        name, value, floor = goal["name"], goal["value"], goal["ideal"]
        if not name.startswith("eager") and value < 0.97 * floor:
            print(f"{name}: {value:.3f} is below its floor of {floor}: either work was skipped or 'all' is slow")
    print(f"written: {path}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

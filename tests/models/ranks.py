"""Two processes joined by gloo, which stay for all tests of a module: starting them takes longer than the tests."""

from __future__ import annotations

import contextlib
import importlib
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing as mp

RANKS = 2
PATIENCE = 60.0  # seconds


class Ranks:
    """Runs functions on every rank. **Raises** `AssertionError` with the traceback of whoever failed."""

    def __init__(self, store: Path) -> None:
        context = mp.get_context("spawn")
        pairs = [context.Pipe() for _ in range(RANKS)]
        self.pipes = [pair[0] for pair in pairs]
        self.processes = [
            context.Process(target=_serve, args=(rank, str(store), pair[1]), daemon=True)
            for rank, pair in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()

    def run(self, function: Any, **kwargs: Any) -> None:
        """Calls `function(rank, **kwargs)`, a function of a module, on every rank."""
        for pipe in self.pipes:
            pipe.send((function.__module__, function.__name__, kwargs))
        errors = [pipe.recv() if pipe.poll(PATIENCE) else "no answer" for pipe in self.pipes]
        assert not any(errors), "\n".join(f"rank {rank}: {error}" for rank, error in enumerate(errors))

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
            process.join()


def _serve(rank: int, store: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=PATIENCE / 2)
    )
    while True:
        try:
            module, name, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own, about gloo and its older interfaces
                getattr(importlib.import_module(module), name)(rank, **kwargs)
        except BaseException:
            with contextlib.suppress(OSError):
                pipe.send(traceback.format_exc())
        else:
            pipe.send(None)

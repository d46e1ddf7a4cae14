"""Two processes joined by gloo, which stay for all tests of a process: starting them takes longer than the tests."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import tempfile
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing as mp

RANKS = 2
PATIENCE = 60.0  # seconds
PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "transformers.models.llama.modeling_llama",
    "peft",
]


class Ranks:
    """Runs functions on every rank. **Raises** `AssertionError` with the traceback of whoever failed."""

    def __init__(self) -> None:
        self.fine = True
        self.folder = tempfile.TemporaryDirectory(prefix="gloo")
        store = Path(self.folder.name) / "store"
        # Forks of one process that has imported what takes long, and has run nothing.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
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
        self.fine = False
        for pipe in self.pipes:
            pipe.send((function.__module__, function.__name__, kwargs))
        errors = [pipe.recv() if pipe.poll(PATIENCE) else "no answer" for pipe in self.pipes]
        assert not any(errors), "\n".join(f"rank {rank}: {error}" for rank, error in enumerate(errors))
        self.fine = True

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
            process.join()
        self.folder.cleanup()


_joined: list[Ranks] = []


def joined() -> Ranks:
    """The ranks of this process, new ones after a failure: what it left behind is no other test's."""
    if _joined and not _joined[0].fine:
        _joined.pop().stop()
    if not _joined:
        _joined.append(Ranks())
        atexit.register(_joined[0].stop)
    return _joined[0]


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

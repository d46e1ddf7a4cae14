"""What attention's C++ for GPUs has of each thread: a context of the driver's, and which calls were its first."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import ckptfused
from tests.fake_cuda import gpus

ROOT = Path(__file__).parents[2]

CONTEXTS = """
    import contextlib, json, threading
    import torch
    import ckptfused
    from tests.fake_cuda import gpus

    def attend():
        q, state = torch.empty(1, 2, 5, 16, device="cuda:0"), torch.zeros(2, dtype=torch.int64, device="cuda:0")
        gpus.calls()
        with contextlib.suppress(Exception):  # Triton finds no GPU to compile for
            torch.ops.ckptfused.attention_fwd(
                q, q, q, None, None, None, state, "none", "none", 0.3, True, 0, 0.0, 0.5
            )
        return [call.device for call in gpus.calls("set device")]

    def scenes():
        context = gpus._library().fake_context
        found = []
        for there in (0, 1, 0):
            context(there)
            found.append(attend())
        print(json.dumps(found))

    thread = threading.Thread(target=scenes)
    thread.start()
    thread.join()
"""


@pytest.mark.slow
@gpus.needs_cuda_build
@pytest.mark.skipif(not ckptfused.build_info()["cuda_architectures"], reason="needs a build with CUDA")
def test_a_context_is_made_where_there_is_none(tmp_path: Path) -> None:
    """One that the user pushed stays the thread's."""
    assert json.loads(gpus.run(CONTEXTS, tmp_path).splitlines()[-1]) == [[0], [], [0]]


FIRST = """
    import threading, torch
    from ckptfused._extension import _C

    def attend(lengths):
        for length in lengths:
            q = torch.empty(1, length, 2, 16, dtype=torch.bfloat16, device="meta").transpose(1, 2)
            _C.testing.attention_aten_fwd("cudnn", q, q, q, 0.3, True)

    def in_a_thread(lengths):
        thread = threading.Thread(target=attend, args=(lengths,))
        thread.start()
        thread.join()

    in_a_thread([1, 2, 1])
    in_a_thread([2])
    attend([*range(1, 1026), 1, 1025])
"""


@pytest.mark.slow
@pytest.mark.once
def test_first_calls_are_a_threads_and_few() -> None:
    """What a thread has seen ends with it; after 1024 kinds it begins anew, so that the first is a first again."""
    environment = os.environ | {"TORCH_CPP_LOG_LEVEL": "INFO", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(FIRST)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    found = [int(n) for n in re.findall(r"the first of q 1 2 (\d+) 16 on this thread", done.stderr)]
    assert found == [1, 2, 2, *range(1, 1026), 1]

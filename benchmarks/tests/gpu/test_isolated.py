"""Processes of their own: what comes back of one that works, fails, crashes or hangs."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from benchmarks.gpu import isolated

MODULE = """
import os, sys, time
name = sys.argv[sys.argv.index("--only") + 1]
blocking, checked = os.environ.get("CUDA_LAUNCH_BLOCKING"), os.environ.get("UNDER_MEMCHECK")
if name == "good":
    print("words")
    print('RESULT {"value": 3}')
elif name == "wrong":
    sys.exit("x: wrong result: worst at row 2")
elif name == "crash":
    print("=== out of bounds at thread 5" if checked else "sync error in kernel k" if blocking else "async error")
    sys.stdout.flush()
    os._exit(9)
elif name == "silent":
    pass
else:
    time.sleep(60)
"""

pytestmark = pytest.mark.once


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "checks_of_a_test.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "checks_of_a_test"


def test_what_comes_back(module: str) -> None:
    ended = {one.name: one for one in isolated.run_each(module, ["good", "wrong", "crash", "silent"], [], 2, 600)}
    assert ended["good"] == isolated.Ended("good", {"value": 3})
    assert ended["wrong"].error == "x: wrong result: worst at row 2"
    assert ended["crash"].error == "async error"
    assert ended["silent"].error == "exit status 0"  # without a result nothing was shown
    hung = isolated.run("hang", isolated.command(module, "hang", []), 1)
    assert hung.error.startswith("not done in 1 s")


def test_the_last_whole_result_counts() -> None:
    """A process is ended while it writes another result."""
    assert isolated._given('RESULT {"value": 1}\nwords\nRESULT {"value": 2}\nRESULT {"val') == {"value": 2}
    assert isolated._given("words\n") is None


def test_one_that_fails_is_run_again(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs again with each kernel waited for, and under a compute-sanitizer, here one that only starts what it is
    given.
    """
    program = tmp_path / "compute-sanitizer"
    program.write_text(f'#!/bin/sh\nshift {len(isolated.MEMCHECK)}\nUNDER_MEMCHECK=1 exec "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(isolated, "sanitizer", lambda: str(program))
    ended = list(isolated.run_each(module, ["good", "crash"], [], 1, 600))
    isolated.examine(module, ended, [], 600)
    assert isolated.failures(ended) == {
        "crash": {
            "error": "async error",
            "each kernel waited for": "sync error in kernel k",
            "memcheck": "=== out of bounds at thread 5",
        }
    }
    text = isolated.shown(ended)
    assert text.startswith("FAILED crash\n  error: async error")
    assert "memcheck: === out of bounds at thread 5" in text


def test_one_at_a_time_holds_the_gpu(tmp_path: Path) -> None:
    """Whoever finds the file held waits until it is let go; of a file, threads are told apart as processes are."""
    lock, got = tmp_path / "lock", threading.Event()

    def other() -> None:
        with isolated.alone(lock):
            got.set()

    thread = threading.Thread(target=other)
    with isolated.alone(lock):
        thread.start()
        assert not got.wait(0.3)
    thread.join(60)
    assert got.is_set()

"""Python processes that start with torch imported: forks of one that has imported nothing of ckptfused.

Importing torch takes longer than most of what tests ask of a process of their own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class Server:
    """Starts such processes one after another, each with these modules imported."""

    def __init__(self, *preload: str) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), *preload]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        atexit.register(self._process.communicate)

    def python(
        self, code: str, cwd: Path, environment: Mapping[str, str], arguments: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """The same as `python -c code arguments`, but for what is imported already, PYTHONPATH among it."""
        with tempfile.TemporaryDirectory() as folder:
            said = [Path(folder) / name for name in ("stdout", "stderr")]
            request = [code, str(cwd), {**environment}, [*arguments], [*map(str, said)]]
            assert self._process.stdin is not None and self._process.stdout is not None
            print(json.dumps(request), file=self._process.stdin, flush=True)
            status = int(self._process.stdout.readline())
            return subprocess.CompletedProcess(["-c", *arguments], status, *(path.read_text() for path in said))


server = functools.cache(Server)


def python(code: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process that has imported torch and nothing of ckptfused."""
    return server("torch").python(textwrap.dedent(code), cwd, os.environ | environment)


def command(*words: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """The same as `python words` of a script, or of a module after -m."""
    run, name, *options = ("run_module", *words[1:]) if words[0] == "-m" else ("run_path", *words)
    return python(
        f"""
        import runpy, sys
        sys.path.append({str(ROOT)!r})
        sys.argv = {[name, *options]!r}
        runpy.{run}({name!r}, run_name="__main__")
        """,
        cwd,
        **environment,
    )


def _run(code: str, cwd: str, environment: dict[str, str], arguments: list[str], said: list[str]) -> int:
    """In the fork: the exit status of the code, whose output goes to two files."""
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for stream, path in zip((1, 2), said, strict=True):
        with open(path, "w") as file:
            os.dup2(file.fileno(), stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, cwd)
    sys.argv = ["-c", *arguments]
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def serve() -> None:
    del sys.path[0]  # this folder, whose packages have the names of others
    with contextlib.redirect_stdout(sys.stderr):
        for name in sys.argv[1:]:
            importlib.import_module(name)
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            status = 1
            try:
                status = _run(*json.loads(line))
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()

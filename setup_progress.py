"""For setup.py: a quiet build says how far it is, instead of each compiler's command line."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parent
# `ninja -v`: how many steps are done, and the command of the one just ended; what the compiler said follows.
STEP = re.compile(r"\[(\d+)/(\d+)\] .*? -c (?!-)(\S+)")
LINES = 4  # where no terminal shows them in place


def show(lines: Iterable[str], out: TextIO) -> None:
    """Copies lines, each that ninja prints of a step as the step's number and source: in place on a terminal."""
    in_place, shown = out.isatty(), False
    for line in lines:
        step = STEP.match(line)
        if step is None:
            out.write("\n" * shown + line)
            shown = False
        else:
            done, total = int(step[1]), int(step[2])
            said = f"[{done}/{total}] {os.path.relpath(step[3], ROOT)}"
            if in_place:
                out.write(f"\r\x1b[K{said}")
                shown = True
            elif done * LINES // total > (done - 1) * LINES // total:
                out.write(f"{said}\n")
        out.flush()
    out.write("\n" * shown)
    out.flush()


@contextmanager
def progress() -> Iterator[None]:
    """Within, what this process and its children print goes through `show`."""
    sys.stdout.flush()
    terminal = os.dup(1)
    read, write = os.pipe()
    os.dup2(write, 1)
    os.close(write)
    with open(terminal, "w") as out, open(read, errors="replace") as lines:
        thread = threading.Thread(target=show, args=(lines, out))
        thread.start()
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(terminal, 1)  # the pipe's last end for writing is closed, so the thread ends
            thread.join()

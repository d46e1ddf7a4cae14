"""`python left_early.py SCRIPT OPTIONS…`: runs a script and leaves without taking the interpreter down.

torch 2.13's gloo threads may still hold a tensor then, and abort for want of the interpreter's lock: on a busy machine
one run in ten, with or without ckptfused (github.com/pytorch/pytorch/pull/179291).
"""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    os._exit(0)

"""For setup.py: a sentence, rather than a compiler's errors, where the extension has never been built."""

from __future__ import annotations

import os
import platform
import runpy
import sys
from pathlib import Path

TRY_ANYWAY = "CKPTFUSED_ANY_PLATFORM"
X86_64 = ("x86_64", "amd64")


VERSIONS = runpy.run_path(str(Path(__file__).parent / "ckptfused/compat/versions.py"))


def check(torch_version: str) -> None:
    """Ends the build with a PyTorch or on a system that is none of ours, warns on a processor that is no x86-64."""
    unsupported = VERSIONS["unsupported"](torch_version)
    if unsupported and os.environ.get(TRY_ANYWAY, "0") == "0":
        sys.exit(f"{unsupported}. {TRY_ANYWAY}=1 tries the build all the same.")
    system, machine = platform.system(), platform.machine()
    here = f"{system} on {machine or 'an unknown processor'}"
    tested = "ckptfused is built and tested on Linux on x86_64 (g++ >= 11 or clang >= 14)"
    if system == "Linux":
        if machine.lower() not in X86_64:
            print(
                f"{tested}; this is {here}. The build goes on: nothing in the code asks for x86-64, but its tests\n"
                "have not run on this. Run them: make test",
                file=sys.stderr,
                flush=True,
            )
    elif os.environ.get(TRY_ANYWAY, "0") == "0":
        sys.exit(
            f"{tested}; this is {here}, where its flags and OpenMP have never been tried.\n"
            f"Expected: Linux; on Windows, WSL 2 is one. {TRY_ANYWAY}=1 tries the build all the same."
        )

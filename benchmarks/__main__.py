"""The measurements on a CPU: `python -m benchmarks NAME`, or `--list`."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable

from benchmarks.names import NAMES, OTHERS, foreign, options

_HELP = ("--list", "-l", "--help", "-h")


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a message, as of `ckptfused.spec.checks.nearest`, which brings torch along here."""
    near = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


def main(words: list[str]) -> int:
    """Runs a command; 2 for a name that is none."""
    known = (*NAMES, *OTHERS)
    if words and words[0] not in (*known, *_HELP):
        said = f"expected one of {', '.join(known)}, got {words[0]}{nearest(words[0], known)}"
        print(f"benchmarks: {said}", file=sys.stderr)
        return 2
    if wrong := foreign(words):
        print(f"benchmarks: no command has the option {wrong}{nearest(wrong, options())}", file=sys.stderr)
        return 2
    from benchmarks import runner

    return runner.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

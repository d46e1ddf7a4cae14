"""The measurements on a CPU: `python -m benchmarks NAME`, or `--list`."""

from __future__ import annotations

import difflib
import sys

from benchmarks.names import NAMES, OTHERS

_HELP = ("--list", "-l", "--help", "-h")


def main(words: list[str]) -> int:
    """Runs a command; 2 for a name that is none."""
    known = (*NAMES, *OTHERS)
    if words and words[0] not in (*known, *_HELP):
        near = difflib.get_close_matches(words[0], known, 1)
        said = f"; did you mean {near[0]}?" if near else ""
        print(f"benchmarks: expected one of {', '.join(known)}, got {words[0]}{said}", file=sys.stderr)
        return 2
    from benchmarks import runner

    return runner.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The measurements on a CPU: `python -m benchmarks NAME`, or `--list`."""

from __future__ import annotations

import sys

from benchmarks.runner import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Files that a command writes, for argparse: looked at before the work is done."""

from __future__ import annotations

import argparse
from pathlib import Path


def output(text: str) -> str:
    """For argparse: a file that can be written, looked at before the work is done."""
    path = Path(text)
    new = not path.exists()
    try:
        path.open("ab").close()  # what permissions say is not all: of /proc, or for root
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"expected a file in a folder that can be written, got {text!r}: {error.strerror}"
        ) from None
    if new:
        path.unlink()
    return text


def picture_path(text: str) -> str:
    """The path of a picture, of a kind that matplotlib writes; a name without an ending becomes a PNG."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ModuleNotFoundError as error:
        raise argparse.ArgumentTypeError(f"needs {error.name}: pip install {error.name}") from None
    kinds = FigureCanvasBase.get_supported_filetypes()
    if Path(text).suffix.removeprefix(".").lower() not in ("", *kinds):
        raise argparse.ArgumentTypeError(
            f"expected a picture's name, ending in one of {', '.join(kinds)}, got {text!r}"
        )
    return output(text)

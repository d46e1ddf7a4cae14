"""Files that a command writes, for argparse: looked at before the work is done."""

from __future__ import annotations

import argparse
import errno
import os
from pathlib import Path


def output(text: str) -> str:
    """For argparse: a file that can be written, looked at before the work is done."""
    path = Path(text)
    try:
        if path.exists() or path.is_symlink():
            where = path if path.exists() else path.resolve().parent
            if path.is_dir() or not os.access(where, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        else:  # made for a trial: of /sys and /proc, or for root, permissions do not say all
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            path.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"expected a file in a folder that can be written, got {text!r}: {error.strerror}"
        ) from None
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

"""Which transformers is installed, for what only some versions of it do."""

from __future__ import annotations

import functools
from importlib import metadata

import pytest


@functools.cache
def transformers() -> tuple[int, int]:
    """Major and minor number; (0, 0) without it."""
    try:
        major, minor, *_ = metadata.version("transformers").split(".")
    except metadata.PackageNotFoundError:
        return (0, 0)
    return int(major), int(minor)


def since(version: tuple[int, int], what: str) -> pytest.MarkDecorator:
    """Skips a test of what an older transformers does otherwise. what: what this version began to do."""
    number = ".".join(map(str, version))
    return pytest.mark.skipif(transformers() < version, reason=f"from transformers {number}: {what}")

"""What is decided of one layer of a model."""

from __future__ import annotations

from dataclasses import dataclass

from ckptfused.sizes import parse_bytes
from ckptfused.spec import KEEP_NAMES, KEEP_PRESETS, check_names
from ckptfused.spec.checks import check_flag

_PRESETS = {names: preset for preset, names in KEEP_PRESETS.items()}


@dataclass(frozen=True)
class LayerMode:
    """What is decided of one layer.

    **Raises** `ValueError` or `TypeError` for what is out of its range, naming it, and for `scratch` or `offload` of a
    layer that runs as it was.
    """

    keep: str | tuple[str, ...] | None = "inputs"
    """What it keeps for backward beside its input, a preset or names (`ckptfused.spec.KEEP_PRESETS`), where a preset's
    names are that preset; None: the layer runs as it was, and saves what its own forward saves."""
    scratch: int | None = None
    """Bytes that the hidden-wide values of its FFN may take at a time in backward, an int or "64MiB"; None: by
    device."""
    offload: bool = False
    """Whether its saved input is in host memory between forward and backward."""

    def __post_init__(self) -> None:
        if self.keep is not None and not isinstance(self.keep, str):
            try:
                names = tuple(self.keep)
            except TypeError as error:
                raise TypeError(f"keep: expected a preset, names or None, got {self.keep!r}") from error
            check_names(names)
            names = tuple(name for name in KEEP_NAMES if name in names)
            object.__setattr__(self, "keep", _PRESETS.get(names, names))
        elif self.keep is not None:
            check_names(self.keep)
        if self.scratch is not None:
            object.__setattr__(self, "scratch", parse_bytes("scratch", self.scratch))
        object.__setattr__(self, "offload", check_flag("offload", self.offload))
        if self.keep is None and (self.scratch is not None or self.offload):
            raise ValueError("keep=None: leave out scratch and offload, for the layer runs as it was")

    def __str__(self) -> str:
        said = [] if self.scratch is None else [f"scratch={self.scratch:,} bytes"]
        said += ["offload"] if self.offload else []
        keep = "as it was" if self.keep is None else f"keep={self.keep!r}"
        return ", ".join([keep, *said])

"""Whether a shape's gate and up products go through Triton or through cuBLAS and the pointwise kernel.

ffn_choice() looks it up and measures nothing, so that forward, backward and its replay, eager and captured in a graph,
all get the same answer. tune.tune_ffn() measures, when it is called, and writes what it found to a file of the user's.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ckptfused._extension import _C
from ckptfused.compat.triton import triton_version
from ckptfused.triton.ffn.configs import HALF_DTYPES, FFNConfig, candidates, find_config

from .backend import has_triton as _has_triton

CUBLAS = "cublas"
_FORMAT = 4  # 3: keys without versions; 2: fewer times; 1: of an FFN in one piece, and of no kept backward


@dataclass(frozen=True)
class DeviceKey:
    """What decides, of a device: two machines with the same answer here choose alike."""

    name: str
    capability: tuple[int, int]


@functools.cache
def _cuda_device(index: int) -> DeviceKey:
    return DeviceKey(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index))


def _device(device: DeviceKey | torch.device | str) -> DeviceKey | None:
    """None: no NVIDIA GPU."""
    if isinstance(device, DeviceKey):
        return device
    device = torch.device(device)
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return _cuda_device(torch.cuda.current_device() if device.index is None else device.index)


def cache_file() -> Path:
    """The user's table: in the folder CKPTFUSED_CACHE, or else in ckptfused's own among the user's caches."""
    own, shared = (os.environ.get(name) for name in ("CKPTFUSED_CACHE", "XDG_CACHE_HOME"))
    folder = Path(own) if own else (Path(shared) if shared else Path.home() / ".cache") / "ckptfused"
    return folder / "ffn_tuned.json"


def _read(path: Path) -> dict[str, Any]:
    """The entries of a table; none, with a warning, where the file is not one."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if table["format"] != _FORMAT:
            raise ValueError(f"format {table['format']!r}, expected {_FORMAT}")
        entries = {key: entry for key, entry in table["entries"].items() if isinstance(entry["choice"], str)}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(f"{path}: not a table of tuned shapes, ignored ({error!r})", stacklevel=2)
        return {}
    return entries


@functools.cache
def _table() -> dict[str, Any]:
    """Read once a process."""
    return _read(cache_file())


@functools.cache
def override() -> str | None:
    """CKPTFUSED_FFN, read once: a later change must not part a backward from its forward."""
    value = os.environ.get("CKPTFUSED_FFN", "").strip().lower()
    if value not in ("", "cublas", "triton"):
        raise ValueError(f"CKPTFUSED_FFN: expected cublas or triton, got {value!r}")
    return value or None


_asked: list[str] = []


@contextlib.contextmanager
def going(way: str) -> Iterator[None]:
    """A context in which every shape goes this way, for measurements. Not between a forward and its backward."""
    _asked.append(way)
    _C.forget_ffn_choices()
    try:
        yield
    finally:
        _asked.pop()
        _C.forget_ffn_choices()


def reload() -> None:
    """Forgets the table and the environment variable. Not between a forward and its backward."""
    _table.cache_clear()
    override.cache_clear()
    _C.forget_ffn_choices()


def shape_key(n: int, c: int, f: int, act: str, dtype: torch.dtype, device: DeviceKey) -> str:
    """What a measurement holds for: device, versions of PyTorch and Triton, type, activation and sizes.

    Rows count by the next power of two: a batch a little shorter is the same entry, though its tiles may differ.
    """
    rows, made = 1 << max(n - 1, 0).bit_length(), f"torch {torch.__version__} | triton {triton_version()}"
    return f"{device.name} | {made} | {str(dtype).removeprefix('torch.')} | {act} | n {rows} | c {c} | f {f}"


def ffn_choice(
    n: int, c: int, f: int, act: str, dtype: torch.dtype, device: DeviceKey | torch.device | str
) -> tuple[str, str]:
    """Which way the FFN of n rows goes: (``"cublas"`` or the name of a tile in ffn_configs.py, the reason).

    One answer for forward and backward. A function of the arguments, the table and CKPTFUSED_FFN, both read once.

    **Raises** `RuntimeError` where CKPTFUSED_FFN=triton asks for kernels that this machine cannot have.
    """
    if _asked:
        return _asked[-1], "this way is being measured"
    forced = override()
    if forced == CUBLAS:
        return CUBLAS, "CKPTFUSED_FFN=cublas"
    if dtype not in HALF_DTYPES:
        return CUBLAS, f"the Triton kernels are for bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if c % 16 or f % 16:
        return CUBLAS, f"the Triton kernels are for widths that are multiples of 16, not {c} and {f}"
    found = _device(device)
    if found is None:
        return CUBLAS, f"{device} is no NVIDIA GPU"
    tiles = candidates(found.capability)
    if not tiles or not _has_triton():
        reason = "Triton is not installed" if tiles else f"{found.name} is older than the Triton kernels' devices"
        if forced is None:
            return CUBLAS, reason
        raise RuntimeError(f"CKPTFUSED_FFN=triton: {reason}")
    key = shape_key(n, c, f, act, dtype, found)
    entry = _table().get(key)
    known = {tile.name for tile in tiles}
    if forced is not None:
        best = entry.get("triton") if entry else None
        return (best, "CKPTFUSED_FFN=triton, the tile that was measured") if best in known else (
            tiles[0].name, "CKPTFUSED_FFN=triton, the default tile: this shape was not measured"
        )  # fmt: skip
    if entry is None:
        sizes = f"--rows {n} --width {c} --hidden {f} --activation {act} --dtype {str(dtype).removeprefix('torch.')}"
        return CUBLAS, f"not measured: python -m ckptfused tune {sizes}"
    choice = entry["choice"]
    if choice != CUBLAS and choice not in known:
        return CUBLAS, f"measured with the tile {choice}, which is no more"
    behind = entry.get("no_faster")
    where = f", no faster: {', '.join(behind)}" if behind else ""
    return choice, f"measured: cuBLAS {_ms(entry, 'cublas_ms')}, Triton {_ms(entry, 'triton_ms')}{where}"


def _ms(entry: Mapping[str, Any], name: str) -> str:
    value = entry.get(name)
    return f"{value:.3f} ms" if isinstance(value, (int, float)) else "(no time)"


def config_for(
    name: str, n: int, c: int, f: int, act: str, dtype: torch.dtype, device: DeviceKey | torch.device | str
) -> FFNConfig:
    """The tile of that name, or ("") the one that ffn_choice has, or the device's first."""
    found = _device(device)
    tiles = candidates(found.capability) if found is not None else ()
    if found is None or not tiles:
        raise RuntimeError(f"the Triton FFN kernels have no tiles for {device if found is None else found.name}")
    if not name:
        choice = ffn_choice(n, c, f, act, dtype, found)[0]
        return find_config(choice, found.capability) or tiles[0]
    config = find_config(name, found.capability)
    if config is None:
        raise ValueError(f"config: expected one of {', '.join(t.name for t in tiles)}, got {name!r}")
    return config


def save(key: str, entry: Mapping[str, Any]) -> Path:
    """Adds an entry to the user's table: written beside it and moved over it, so that a reader sees the one or the
    other whole."""
    path = cache_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = {**_read(path), key: dict(entry)}
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"format": _FORMAT, "entries": entries}, file, indent=1, sort_keys=True)
            file.write("\n")
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    return path

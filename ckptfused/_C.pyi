"""The extension's Python module (csrc/autograd/module.cpp); its ops are under torch.ops.ckptfused."""

from collections.abc import Sequence

version: str
torch_version: str
cuda_architectures: str

def current_settings() -> list[int]: ...

class UnderSettings:
    def __init__(self, settings: tuple[int, ...]) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *exception: object) -> None: ...

def cpu_target() -> str: ...
def launch_error(op: str, status: str, built_for: str, gpu: str, major: int, minor: int) -> str: ...
def ffn_tiles(rows: int, width: int, hidden: int, gated: bool, size: int) -> tuple[int, int]: ...
def runs_as_float(dtype: str) -> bool: ...
def count(
    spec: str,
    sizes: Sequence[int],
    dtype: str,
    params: Sequence[tuple[Sequence[int], str] | None],
    cu_seqlens: Sequence[int],
    angle_copies: int,
    device: tuple[bool, int, int, bool, Sequence[int]],
    there: str | None,
    save: bool,
    needs: Sequence[bool] | None,
) -> list[tuple[str, str, int, list[int], str]]: ...

"""The extension's Python module (csrc/autograd/module.cpp); its ops are under torch.ops.ckptfused."""

version: str
torch_version: str
cuda_architectures: str

def cpu_target() -> str: ...
def ffn_tiles(rows: int, width: int, hidden: int, gated: bool, size: int) -> tuple[int, int]: ...

"""The extension's Python module (csrc/autograd/module.cpp); its ops are under torch.ops.ckptfused."""

version: str
torch_version: str
cuda_architectures: str

def cpu_target() -> str: ...
def launch_error(op: str, status: str, built_for: str, gpu: str, major: int, minor: int) -> str: ...
def ffn_tiles(rows: int, width: int, hidden: int, gated: bool, size: int) -> tuple[int, int]: ...
def linear_scratch_bytes(n: int, k: int, c: int, dtype: str) -> int: ...
def adapter_scratch_bytes(
    n: int,
    k: int,
    m: int,
    ranks: int,
    backward: bool,
    din: bool,
    da_ranks: int,
    db_ranks: int,
    dbiases: int,
    dtype: str,
    threads: int,
) -> int: ...
def attention_scratch_bytes(backward: bool, dtype: str, queries: int, keys: int, head_dim: int) -> int: ...

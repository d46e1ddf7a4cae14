"""A CUDA build of the extension made where there is no GPU, for use where minutes count.

    python -m benchmarks.gpu.extension

Leaves build/gpu-extension/ckptfused/_C<suffix> and, beside it, _C.json, which says for which Python, PyTorch and
sources it was made. `make gpu` puts it in its place where all of these are the ones at hand, and builds where not.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "gpu-extension" / "ckptfused"
ARCHITECTURES = "9.0"
MOST = 40 << 20  # bytes: it travels with every call to a rented machine


def name() -> str:
    """What this Python calls the extension."""
    return f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"


def digest(root: Path = ROOT) -> str:
    """A digest of everything that the extension is compiled from."""
    sources = (path for path in (root / "csrc").rglob("*") if path.is_file())
    files = [path for path in sources if "tests" not in path.relative_to(root).parts]
    found = hashlib.sha256()
    for path in sorted([*files, root / "setup.py", root / "setup_cuda.py"]):
        found.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def here() -> dict[str, str]:
    """What a build has to agree with to be used."""
    import torch

    return {
        "Python": str(sysconfig.get_config_var("SOABI")),
        "PyTorch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "C++11 ABI": str(torch.compiled_with_cxx11_abi()),
        "sources": digest(),
    }


def unfit(folder: Path = FOLDER) -> str:
    """Why the build in a folder cannot be used here; empty where it can."""
    record = folder / "_C.json"
    if not record.exists() or not (folder / name()).exists():
        return f"no {name()} in {folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder}"
    made, wanted = json.loads(record.read_text()), here()
    other = [what for what, value in wanted.items() if made.get(what) != value]
    shown = "; ".join(f"{what} {str(made.get(what))[:24]}, here {wanted[what][:24]}" for what in other)
    return f"made for another one: {shown}" if other else ""


def place(folder: Path = FOLDER, package: Path = ROOT / "ckptfused") -> str:
    """Puts the build where Python looks for it, or says why not."""
    reason = unfit(folder)
    if not reason:
        partial = package / f"{name()}.partial"
        shutil.copy(folder / name(), partial)
        partial.replace(package / name())  # a process that has loaded the one before keeps it
    return reason


def main() -> None:
    """Builds anew; ccache and `build/` hold what has not changed."""
    environment = os.environ | {"CKPTFUSED_CUDA": "1"}
    environment.setdefault("TORCH_CUDA_ARCH_LIST", ARCHITECTURES)
    temporary = f"build/gpu-{sys.implementation.cache_tag}"
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-temp", temporary]
    shutil.rmtree(FOLDER, ignore_errors=True)
    made_for = here()
    subprocess.run([*command, "--build-lib", str(FOLDER.parent)], cwd=ROOT, env=environment, check=True)
    size = (FOLDER / name()).stat().st_size
    if size > MOST:
        raise SystemExit(
            f"{name()} has {size / 2**20:.1f} MiB, more than {MOST >> 20}: fewer architectures make it less"
        )
    if here() != made_for:
        raise SystemExit("the sources changed while they were compiled: make it again")
    record = made_for | {"architectures": environment["TORCH_CUDA_ARCH_LIST"], "bytes": size}
    (FOLDER / "_C.json").write_text(json.dumps(record, indent=2) + "\n")
    print(
        f"{FOLDER.relative_to(ROOT) / name()}: {size / 2**20:.1f} MiB for {made_for['Python']}, {made_for['PyTorch']}"
    )


if __name__ == "__main__":
    main()

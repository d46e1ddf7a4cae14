"""For setup.py: whether to build the CUDA kernels, with which toolkit, and for which GPUs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

# TORCH_CUDA_ARCH_LIST overrides it. The PTX serves GPUs that are newer.
ARCHITECTURES = "8.0;9.0+PTX"
NVCC_FLAGS = ["-O3"]
# Of those that torch's headers include; a toolkit installed in parts may lack them.
HEADERS = ("cuda_runtime_api.h", "cublas_v2.h", "cusparse.h")


def find_toolkit() -> Path | None:
    """The toolkit that CUDA_HOME or CUDA_PATH names, else the one of the nvcc on PATH, which may be a wrapper."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc")
    if not home and nvcc is not None:
        plan = subprocess.run([nvcc, "--dryrun", "x.cu"], capture_output=True, text=True, check=False)
        top = re.search(r"^#\$ TOP=(.+)$", plan.stderr, re.MULTILINE)
        home = top.group(1).strip() if top else str(Path(nvcc).resolve().parents[1])
    toolkit = Path(home or "/usr/local/cuda").resolve()
    return toolkit if (toolkit / "bin" / "nvcc").exists() else None


def toolkit_version(toolkit: Path) -> str | None:
    """The release that a toolkit's nvcc names, such as 13.0; None where it does not run or names none."""
    try:
        run = subprocess.run([toolkit / "bin" / "nvcc", "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    release = re.search(r"release (\d+\.\d+)", run.stdout)
    return release.group(1) if release and run.returncode == 0 else None


def obstacle(toolkit: Path | None) -> str:
    """Why the CUDA kernels cannot be compiled for this PyTorch with this toolkit; empty where they can."""
    built_for = torch.version.cuda
    if built_for is None:
        return f"this PyTorch ({torch.__version__}) was built without CUDA"
    wanted = f"PyTorch {torch.__version__} was built for CUDA {built_for}"
    if toolkit is None:
        return f"{wanted}, but there is no nvcc"
    found = toolkit_version(toolkit)
    if found is None:
        return f"{wanted}, but {toolkit / 'bin' / 'nvcc'} does not say its version"
    if found.split(".")[0] != built_for.split(".")[0]:  # torch.utils.cpp_extension refuses it
        return f"{wanted}, but the nvcc in {toolkit / 'bin'} is of CUDA {found}, another major version"
    return ""


def refused_compiler(toolkit: Path) -> str:
    """Why a toolkit's nvcc does not take the host's C++ compiler, by the check that torch.utils.cpp_extension makes
    before a build; empty where it does."""
    from torch.utils import cpp_extension

    cpp_extension.CUDA_HOME = str(toolkit)
    compiler = cpp_extension.get_cxx_compiler().split()[0]  # the words after it are options, as setuptools has it
    try:
        _, version = cpp_extension.get_compiler_abi_compatibility_and_version(compiler)
        cpp_extension._check_cuda_version(compiler, version)
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        return f"its nvcc does not take the C++ compiler {compiler}: {error}".rstrip(".")
    return ""


def sanitizer() -> str:
    """Where compute-sanitizer is; empty where it is not."""
    beside = (find_toolkit() or Path("/usr/local/cuda")) / "bin" / "compute-sanitizer"
    return shutil.which("compute-sanitizer") or (str(beside) if beside.exists() else "")


def toolkit_to_use() -> Path | None:
    """The toolkit to compile the CUDA kernels with; None: build for the CPU alone.

    CKPTFUSED_CUDA=0 builds for the CPU alone, CKPTFUSED_CUDA=1 fails rather than leave the CUDA kernels out.
    """
    choice = os.environ.get("CKPTFUSED_CUDA", "")
    if choice == "0":
        return None
    toolkit = find_toolkit() if torch.version.cuda else None
    missing = obstacle(toolkit)
    if not missing and toolkit is not None:
        os.environ["CUDA_HOME"] = str(toolkit)  # for torch.utils.cpp_extension, which does not ask a wrapper
        missing = refused_compiler(toolkit)
        if not missing:
            return toolkit
    if choice == "1":
        sys.exit(f"ckptfused: CKPTFUSED_CUDA=1 asks for CUDA kernels, but {missing}.")
    if torch.version.cuda is not None:
        print(
            f"ckptfused: {missing}, so the CUDA kernels are left out and the build serves the CPU alone.\n"
            f"For the GPU install the compiler of CUDA {torch.version.cuda}, put nvcc on PATH or set CUDA_HOME (and\n"
            "CXX, a C++ compiler that it takes), and build again. CKPTFUSED_CUDA=0 silences this.",
            file=sys.stderr,
            flush=True,
        )
    return None


def architecture_flags() -> list[str]:
    """nvcc's -gencode flags."""
    from torch.utils import cpp_extension

    if not os.environ.get("TORCH_CUDA_ARCH_LIST"):
        os.environ["TORCH_CUDA_ARCH_LIST"] = ARCHITECTURES
    return cpp_extension._get_cuda_arch_flags()


def architecture_names(flags: list[str]) -> list[str]:
    """What the flags compile for: sm_90 is code for the GPU, compute_90 is PTX."""
    names = {name for flag in flags for name in re.findall(r",code=(\w+)", flag)}
    return sorted(names, key=lambda name: (name.startswith("compute"), int(re.sub(r"\D", "", name)), name))


def missing_headers(toolkit: Path) -> list[str]:
    """Folders of the Python environment's nvidia packages that have headers which the toolkit lacks."""
    wanted = [name for name in HEADERS if not (toolkit / "include" / name).exists()]
    folders = sorted(Path(torch.__file__).resolve().parents[1].glob("nvidia/*/include"))
    return [str(folder) for folder in folders if any((folder / name).exists() for name in wanted)]

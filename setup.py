"""Builds ``ckptfused._C`` from ``csrc/``: one extension, sources found by folder.

The extension is compiled against the PyTorch that is already installed, so build with
``pip install --no-build-isolation .``. ``MAX_JOBS`` limits the number of compilers at work. The CUDA kernels are
compiled where this PyTorch has CUDA and nvcc is found (``CKPTFUSED_CUDA=0``: never, ``1``: or fail), for the
architectures in ``TORCH_CUDA_ARCH_LIST``.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

from setuptools import setup

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    sys.exit(
        "ckptfused is compiled against the PyTorch you run it with, and this build environment has none.\n"
        "Expected: torch >= 2.11 importable while building. Install it first, then build without isolation:\n"
        "    pip install torch setuptools wheel ninja pybind11\n"
        "    pip install --no-build-isolation ."
    )

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # pip runs this file without it
import setup_cuda  # noqa: E402
import setup_platform  # noqa: E402
import setup_progress  # noqa: E402

TOOLKIT = setup_cuda.toolkit_to_use()
from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension  # noqa: E402  (reads CUDA_HOME)

VERSION = setup_platform.VERSIONS["VERSION"]
FOLDERS = ("kernels/cpu", "ops", "block", "autograd", "loss", "experts", "python")
CUDA_FOLDERS = ("kernels/cuda",)
# The one header through which these folders see torch: parsed once, not once a file.
PRECOMPILED = ROOT / "csrc/ops/torch.h"
OPENMP = ["-fopenmp"] if sys.platform == "linux" else []  # at::parallel_for is an inline omp pragma
CXX_FLAGS = ["-O3", "-g0", "-Wall", "-Wno-sign-compare", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]


def sources(folders: tuple[str, ...], suffix: str) -> list[str]:
    """Paths relative to this file, as sdist and wheel builds want them, in a stable order."""
    found = (path for folder in folders for path in (ROOT / "csrc" / folder).rglob(f"*{suffix}"))
    return sorted(str(path.relative_to(ROOT)) for path in found)


def extension():
    cpp, cuda = sources(FOLDERS, ".cpp"), sources(CUDA_FOLDERS, ".cu")
    cxx_flags, nvcc_flags, headers = CXX_FLAGS + OPENMP, [*setup_cuda.NVCC_FLAGS], []
    if TOOLKIT is not None:
        gencode = setup_cuda.architecture_flags()
        nvcc_flags += gencode
        cxx_flags.append(f'-DCKPTFUSED_CUDA_ARCHS="{" ".join(setup_cuda.architecture_names(gencode))}"')
        headers = setup_cuda.missing_headers(TOOLKIT)
    else:  # the op files of the other device stay out of a build that lacks its kernels
        cpp, cuda = [path for path in cpp if not path.endswith("_cuda.cpp")], []
    found = (CUDAExtension if cuda else CppExtension)(
        "ckptfused._C",
        sources=cpp + cuda,
        include_dirs=[str(ROOT / "csrc")],
        define_macros=[
            ("CKPTFUSED_VERSION", f'"{VERSION}"'),
            ("CKPTFUSED_TORCH_VERSION", f'"{torch.__version__}"'),
        ],
        # No -std here: torch adds the standard that its own headers need (C++17 or C++20).
        extra_compile_args={"cxx": cxx_flags, "nvcc": nvcc_flags},
        extra_link_args=OPENMP,
    )
    found.include_dirs += headers  # behind the toolkit's own
    return found


class BuildExtensionWithHeader(BuildExtension):
    """BuildExtension that first precompiles ``csrc/ops/torch.h`` (g++ finds the ``.gch`` by include path)."""

    def finalize_options(self):
        super().finalize_options()
        self.force = True  # without ninja, too: dates of files do not tell that torch has changed

    def run(self):
        setup_platform.check(torch.__version__)  # here, because an sdist or its metadata can be made anywhere
        super().run()

    def build_extension(self, ext):
        if sys.platform == "linux" and PRECOMPILED.exists() and os.environ.get("CKPTFUSED_PCH", "1") != "0":
            ext.include_dirs.insert(0, str(self.precompile(ext)))
        with nullcontext() if self.distribution.verbose else setup_progress.progress():
            super().build_extension(ext)

    def precompile(self, ext) -> Path:
        folder = (Path(self.build_temp) / "precompiled").resolve()
        target = folder / PRECOMPILED.relative_to(ROOT / "csrc").with_suffix(".h.gch")
        flags = list(ext.extra_compile_args["cxx"])
        if not any(flag.startswith("-std=") for flag in flags):
            flags.append("-std=c++20" if "202002" in torch.__config__.show() else "-std=c++17")
            ext.extra_compile_args["cxx"] = flags  # the header and its users must agree on every flag
        defines = [f"-D{name}={value}" for name, value in ext.define_macros]
        includes = [f"-I{path}" for path in ext.include_dirs + self.compiler.include_dirs]
        compiler = [os.environ.get("CXX", "c++"), *self.compiler.compiler_so[1:]]
        command = [*compiler, *includes, *defines, *flags, "-x", "c++-header", str(PRECOMPILED), "-o", str(target)]
        key = hashlib.sha256("\0".join([*command, PRECOMPILED.read_text()]).encode()).hexdigest()
        stamp = target.with_suffix(".key")
        if not (target.exists() and stamp.exists() and stamp.read_text() == key):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(PRECOMPILED, target.with_suffix(""))  # for a second #include of it, past its guard
            subprocess.run(command, check=True)
            stamp.write_text(key)
        return folder


setup(version=VERSION, ext_modules=[extension()], cmdclass={"build_ext": BuildExtensionWithHeader})

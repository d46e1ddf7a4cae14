"""The build: its errors, its metadata, and the wheel in an environment where the source tree is out of reach."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
from pathlib import Path

import pytest
import torch

import ckptfused
from ckptfused.compat import versions
from tests.forks import python

ROOT = Path(__file__).resolve().parents[2]


def test_build_without_torch_says_what_to_do() -> None:
    run = python("import sys, runpy; sys.modules['torch'] = None; runpy.run_path('setup.py')")
    assert run.returncode != 0
    assert "--no-build-isolation" in run.stderr
    assert "torch >= 2.11" in run.stderr
    assert "Traceback" not in run.stderr


def test_build_requirements_do_not_pull_another_torch() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    requires = re.search(r"^requires = \[(.*)\]$", text, re.MULTILINE)
    assert requires is not None
    assert "torch" not in requires.group(1)


def test_importing_the_package_imports_nothing_heavy() -> None:
    """Beyond PyTorch's own: what only compilation, Triton, models and the command need comes when it is needed."""
    heavy = "torch._dynamo torch._inductor sympy triton transformers peft accelerate rich matplotlib pandas"
    code = f"""
        import sys
        import torch, torch.utils.flop_counter  # which imports Triton in PyTorch 2.11
        before = set(sys.modules)
        import ckptfused
        print(*(name for name in {heavy!r}.split() if name in sys.modules.keys() - before))
    """
    run = python(code)
    assert (run.returncode, run.stdout) == (0, "\n"), run


def test_build_info_says_what_was_built() -> None:
    info = ckptfused.build_info()
    assert info["version"] == ckptfused.__version__
    assert info["torch"] == torch.__version__
    architectures = info["cuda_architectures"]
    assert isinstance(architectures, tuple)
    assert all(re.fullmatch(r"(sm|compute)_\d+a?", name) for name in architectures)


def test_build_info_says_what_the_environment_asks_for() -> None:
    code = "import ckptfused; info = ckptfused.build_info(); print(info['attention'], info['ffn'])"
    run = python(code, CKPTFUSED_ATTENTION="triton", CKPTFUSED_FFN="cublas")
    assert run.stdout.split() == ["triton", "cublas"]


def build_on(system: str, machine: str, more: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """`setup.py build_ext`, up to where the compilers would start, as on another platform."""
    code = f"""
        import platform, runpy, sys
        from torch.utils import cpp_extension
        platform.system, platform.machine = lambda: {system!r}, lambda: {machine!r}
        cpp_extension.BuildExtension.run = lambda self: print("goes on")
        {more}
        sys.argv = ["setup.py", "--quiet", "build_ext"]
        runpy.run_path("setup.py", run_name="__main__")
    """
    return python(code, **{"CKPTFUSED_CUDA": "0", "CKPTFUSED_ANY_PLATFORM": "0"} | environment)


def test_a_build_where_it_is_tested_says_nothing() -> None:
    run = build_on("Linux", "x86_64")
    assert (run.returncode, run.stdout) == (0, "goes on\n")
    assert "ckptfused" not in run.stderr  # PyTorch may say that it finds no GPU


def test_a_build_never_takes_the_extension_of_another_torch_for_up_to_date() -> None:
    more = """cpp_extension.is_ninja_available = lambda: False
        cpp_extension.BuildExtension.run = lambda self: print(self.use_ninja, self.force)"""
    assert build_on("Linux", "x86_64", more).stdout == "False True\n"


def test_a_build_on_another_processor_says_that_it_is_not_tested() -> None:
    run = build_on("Linux", "aarch64")
    assert (run.returncode, run.stdout) == (0, "goes on\n")
    assert "tested on Linux on x86_64" in run.stderr and "this is Linux on aarch64" in run.stderr


@pytest.mark.parametrize(("system", "machine"), [("Windows", "AMD64"), ("Darwin", "arm64")])
def test_a_build_on_another_system_ends_with_one_sentence(system: str, machine: str) -> None:
    run = build_on(system, machine)
    assert (run.returncode, run.stdout) == (1, "")
    assert f"this is {system} on {machine}" in run.stderr and "Expected: Linux" in run.stderr
    assert "Traceback" not in run.stderr
    assert build_on(system, machine, CKPTFUSED_ANY_PLATFORM="1").stdout == "goes on\n"


def test_the_metadata_bounds_torch_as_the_code_does() -> None:
    (bounds,) = re.findall(r'"torch>=([\d.]+),<([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    newer = versions.NEWEST[0], versions.NEWEST[1] + 1
    assert bounds == tuple(".".join(map(str, version)) for version in (versions.OLDEST, newer))
    assert not versions.unsupported(torch.__version__)
    for known in ("2.11.0", "2.13.1+cu130"):
        assert not versions.unsupported(known)
    for other in ("2.10.1", "2.14.0.dev20260901", "2.14.0a0+git1", "3.0.0"):
        assert "works with PyTorch 2.11 to 2.13, and this is " + other in versions.unsupported(other)


def test_a_build_with_a_newer_torch_ends_with_one_sentence() -> None:
    newer = "import torch; torch.__version__ = type(torch.__version__)('2.14.0')"
    run = build_on("Linux", "x86_64", newer)
    assert (run.returncode, run.stdout) == (1, "")
    assert "ckptfused works with PyTorch 2.11 to 2.13, and this is 2.14.0: install" in run.stderr
    assert "Traceback" not in run.stderr
    assert build_on("Linux", "x86_64", newer, CKPTFUSED_ANY_PLATFORM="1").stdout == "goes on\n"


NINJA = """\
[1/8] c++ -MMD -MF x.o.d -fPIC -Icsrc -c -c {root}/csrc/ops/a.cpp -o x.o -O3
[2/8] c++ -c -c {root}/csrc/ops/b.cpp -o x.o
{root}/csrc/ops/b.cpp:3:1: warning: unused variable 'y' [-Wunused-variable]
    3 | int y;
[3/8] /cuda/bin/nvcc -O3 -c -c {root}/csrc/kernels/cuda/c.cu -o x.o
[4/8] c++ -c -c {root}/csrc/ops/d.cpp -o x.o
FAILED: x.o
c++ -c -c {root}/csrc/ops/e.cpp -o x.o
error: expected ';'
ninja: build stopped: subcommand failed.
"""


@pytest.mark.parametrize("terminal", [False, True])
def test_a_quiet_build_shows_progress_and_all_that_compilers_say(terminal: bool) -> None:
    said = "[{}/8] csrc/" if not terminal else "\r\x1b[K[{}/8] csrc/"
    steps = [
        said.format(i + 1) + name for i, name in enumerate(("ops/a.cpp", "ops/b.cpp", "kernels/cuda/c.cu", "ops/d.cpp"))
    ]
    lines = NINJA.format(root=ROOT).splitlines(keepends=True)
    warning, error = "".join(lines[2:4]), "".join(lines[6:])
    expected = [steps[1], "\n", warning, steps[3], "\n", error]
    if terminal:
        expected = [steps[0], steps[1], "\n", warning, steps[2], steps[3], "\n", error]
    code = f"""
        import io, os
        import setup_progress
        out = io.StringIO()
        out.isatty = lambda: {terminal}
        setup_progress.show(io.StringIO(os.environ["SAID"]), out)
        print(repr(out.getvalue()))
    """
    assert ast.literal_eval(python(code, SAID="".join(lines)).stdout) == "".join(expected)


def test_what_a_build_prints_goes_through_it() -> None:
    """Also what its child processes print, up to the moment in which it fails."""
    code = """
        import os, subprocess, sys
        import setup_progress
        try:
            with setup_progress.progress():
                subprocess.run(["echo", f"[4/4] c++ -c -c {os.getcwd()}/csrc/ops/a.cpp -o a.o"])
                print("said here")
                raise OSError
        except OSError:
            print("after")
    """
    assert python(code).stdout == "[4/4] csrc/ops/a.cpp\nsaid here\nafter\n"


def fake_nvcc(folder: Path, prints: str) -> Path:
    folder.mkdir(parents=True)
    nvcc = folder / "nvcc"
    nvcc.write_text(f"#!/bin/sh\n{prints}\n")
    nvcc.chmod(0o755)
    return nvcc


def setup_cuda(code: str, path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs lines with `cuda`, setup_cuda.py as a module, in a process whose PATH is one folder."""
    unset = {"CUDA_HOME": "", "CUDA_PATH": "", "TORCH_CUDA_ARCH_LIST": "", "CKPTFUSED_CUDA": ""}
    return python("import torch, setup_cuda as cuda\n" + textwrap.dedent(code), PATH=str(path), **unset | environment)


def test_the_toolkit_behind_a_wrapper_is_found(tmp_path: Path) -> None:
    fake_nvcc(tmp_path / "toolkit" / "bin", "exit 1")
    fake_nvcc(tmp_path / "wrapper", f"echo '#$ TOP={tmp_path}/toolkit/bin/..' >&2")
    run = setup_cuda("print(cuda.find_toolkit())", tmp_path / "wrapper")
    assert run.stdout.strip() == str(tmp_path / "toolkit"), run.stderr
    fake_nvcc(tmp_path / "other" / "bin", "exit 1")
    run = setup_cuda("print(cuda.find_toolkit())", tmp_path / "wrapper", CUDA_HOME=str(tmp_path / "other"))
    assert run.stdout.strip() == str(tmp_path / "other"), run.stderr


NVCC_12 = "echo 'Cuda compilation tools, release 12.8, V12.8.93'"
NVCC_13 = "echo 'Cuda compilation tools, release 13.1, V13.1.0'"


@pytest.mark.parametrize(("choice", "says"), [("", "CPU alone"), ("0", ""), ("1", "CKPTFUSED_CUDA=1 asks")])
@pytest.mark.parametrize(
    ("nvcc", "why"),
    [
        (None, "there is no nvcc"),
        ("exit 1", "bin/nvcc does not say its version"),
        ("echo nvcc", "bin/nvcc does not say its version"),
        (NVCC_12, "bin is of CUDA 12.8, another major version"),
    ],
    ids=["none", "broken", "unversioned", "another major"],
)
def test_cuda_without_a_matching_nvcc_says_what_happens(
    tmp_path: Path, nvcc: str | None, why: str, choice: str, says: str
) -> None:
    """A build with CKPTFUSED_CUDA=1 ends there, else it goes on for the CPU."""
    if nvcc is not None:
        fake_nvcc(tmp_path / "bin", nvcc)
    code = "torch.version.cuda = '13.0'; print('goes on:', cuda.toolkit_to_use())"
    run = setup_cuda(code, tmp_path, CUDA_HOME=str(tmp_path), CKPTFUSED_CUDA=choice)
    assert (run.returncode == 0) == (choice != "1")
    assert run.stdout.strip() == ("" if choice == "1" else "goes on: None")
    assert says in run.stderr
    assert (run.stderr == "") == (choice == "0")
    assert not says or (why in run.stderr and "Traceback" not in run.stderr)


@pytest.mark.parametrize(
    ("compiler", "options", "unchecked", "why"),
    [
        ("echo 12.2.0", "", "", ""),
        ("echo 12.2.0", " -m64", "", ""),
        ("echo 99.1.0", "", "", r"does not take .*: .* \(99.1.0\) is greater"),
        ("echo 99.1.0", " -m64", "", r"does not take .*: .* \(99.1.0\) is greater"),
        ("echo 99.1.0", "", "1", ""),
        ("exit 1", "", "", "does not take"),
    ],
)
def test_a_host_compiler_that_nvcc_refuses_is_said(
    tmp_path: Path, compiler: str, options: str, unchecked: str, why: str
) -> None:
    """PyTorch's own check, which would end the build, decides it."""
    fake_nvcc(tmp_path / "bin", "echo 'Cuda compilation tools, release 13.0, V13.0.88'")
    program = tmp_path / "g++"
    program.write_text(f"#!/bin/sh\ncase $1 in -v) echo 'gcc version' >&2;; *) {compiler};; esac\n")
    program.chmod(0o755)
    code = "torch.version.cuda = '13.0'; print('goes on:', cuda.toolkit_to_use() is not None)"
    environment = {"CUDA_HOME": str(tmp_path), "CXX": f"{program}{options}", "TORCH_DONT_CHECK_COMPILER_ABI": unchecked}
    run = setup_cuda(code, tmp_path, **environment)
    assert run.stdout.strip().splitlines()[-1:] == [f"goes on: {not why}"], run.stderr
    assert re.search(why, run.stderr) and run.returncode == 0


@pytest.mark.parametrize(("nvcc", "kernels"), [(NVCC_12, False), (NVCC_13, True)], ids=["12.8", "13.1"])
def test_a_build_takes_the_cuda_kernels_in_with_an_nvcc_of_the_same_major_version(
    tmp_path: Path, nvcc: str, kernels: bool
) -> None:
    fake_nvcc(tmp_path / "bin", nvcc)
    more = f"""import torch
        torch.version.cuda = "13.0"
        cpp_extension.CUDA_HOME = {str(tmp_path)!r}  # a PyTorch without CUDA does not look for it
        cpp_extension.BuildExtension.run = lambda self: print(
            [path.endswith(".cu") for path in self.extensions[0].sources].count(True) > 0
        )"""
    run = build_on("Linux", "x86_64", more, CUDA_HOME=str(tmp_path), CUDA_PATH="", CKPTFUSED_CUDA="")
    assert run.stdout.splitlines()[-1:] == [str(kernels)], run.stderr


@pytest.mark.parametrize(
    ("wanted", "built"),
    [("", "sm_80 sm_90 compute_90"), ("9.0", "sm_90"), ("8.6;12.0+PTX", "sm_86 sm_120 compute_120")],
)
def test_architectures(tmp_path: Path, wanted: str, built: str) -> None:
    code = "print(*cuda.architecture_names(cuda.architecture_flags()))"
    run = setup_cuda(code, tmp_path, TORCH_CUDA_ARCH_LIST=wanted)
    assert run.stdout.strip() == built, run.stderr


def test_headers_that_the_toolkit_lacks_come_from_the_environment(tmp_path: Path) -> None:
    include, site = tmp_path / "toolkit/include", tmp_path / "site/nvidia/cu13/include"
    for folder in (include, site, tmp_path / "site/nvidia/cudnn/include"):
        folder.mkdir(parents=True)
    (include / "cusparse.h").touch()
    (site / "cusparse.h").touch()
    code = f"""
        torch.__file__ = '{tmp_path}/site/torch/__init__.py'
        print(cuda.missing_headers(cuda.Path('{tmp_path}/toolkit')))
    """
    assert setup_cuda(code, tmp_path).stdout.strip() == "[]"
    (include / "cusparse.h").unlink()
    assert setup_cuda(code, tmp_path).stdout.strip() == str([str(site)])


def test_a_cuda_tensor_in_a_cpu_build_gives_one_clear_error() -> None:
    if ckptfused.build_info()["cuda_architectures"]:
        pytest.skip("this build has CUDA kernels")
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    for name, args in {"rng_state": (torch.ones(1), 0), "dropout_mask": ([4], 0.5, torch.ones(2).long(), 1)}.items():
        with pytest.raises(RuntimeError, match=f"{name}: got a CUDA tensor, but ckptfused was built for the CPU alone"):
            getattr(torch.ops.ckptfused, name).default.redispatch(cuda, *args)


def test_kernels_that_do_not_run_on_the_gpu_say_what_to_build() -> None:
    def message(status: str) -> str:
        return ckptfused._extension._C.testing.launch_error("norm_fwd", status, "sm_80 sm_90", "NVIDIA Some GPU", 12, 0)

    for status in ("no kernel image is available for execution on the device", "the provided PTX was compiled with"):
        for part in ("norm_fwd", "sm_80 sm_90", "NVIDIA Some GPU", "12.0", "TORCH_CUDA_ARCH_LIST=12.0 pip", status):
            assert part in message(status)
    assert message("out of memory") == "norm_fwd: CUDA says: out of memory"
    for status in ("an illegal memory access was encountered", "device-side assert triggered"):
        assert f"norm_fwd: CUDA says: {status}. " in message(status)
        assert "an earlier kernel, also of another library" in message(status)


def test_another_torch_gives_one_clear_error() -> None:
    run = python("import torch; torch.__version__ = type(torch.__version__)('9.9.9'); import ckptfused")
    assert run.returncode != 0
    message = run.stderr.strip().splitlines()[-1]
    assert message.startswith("ImportError: ckptfused works with PyTorch 2.11 to 2.13, and this is 9.9.9: install")
    other = f"{versions.OLDEST[0]}.{versions.OLDEST[1]}.99"  # one that is supported, but not this one
    run = python(f"import torch; torch.__version__ = type(torch.__version__)('{other}'); import ckptfused")
    message = run.stderr.strip().splitlines()[-1]
    assert message.startswith(f"ImportError: ckptfused was built against PyTorch {torch.__version__}, but {other} is")


def test_with_what_was_built_for_a_newer_torch_all_the_same_there_is_a_warning(tmp_path: Path) -> None:
    (package_without_extension(tmp_path) / "ckptfused/_C.py").write_text("torch_version = '2.14.0'")
    newer = "import torch; torch.__version__ = type(torch.__version__)('2.14.0')"
    (tmp_path / "ckptfused/__init__.py").write_text("from ckptfused import _extension")
    run = python(f"{newer}; import ckptfused", cwd=tmp_path)
    assert run.returncode == 0
    assert "UserWarning: ckptfused works with PyTorch 2.11 to 2.13, and this is 2.14.0: install" in run.stderr


def package_without_extension(folder: Path) -> Path:
    """A copy of the package as a checkout has it; imported from its folder."""
    shutil.copytree(ROOT / "ckptfused", folder / "ckptfused", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return folder


def import_error(folder: Path, **environment: str) -> str:
    run = python("import ckptfused", cwd=folder, **environment)
    assert run.returncode == 1
    message = run.stderr.strip().splitlines()[-1]
    assert message.startswith("ImportError: ")
    return message


def test_without_an_extension_the_error_says_what_to_do(tmp_path: Path) -> None:
    message = import_error(package_without_extension(tmp_path))
    assert "is not built" in message and str(tmp_path / "ckptfused") in message
    assert message.endswith("in the folder of ckptfused's source: pip install --no-build-isolation .")
    assert "circular" not in message


def test_an_extension_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    (package_without_extension(tmp_path) / f"ckptfused/_C{sysconfig.get_config_var('EXT_SUFFIX')}").write_text("none")
    message = import_error(tmp_path)
    assert "built against another PyTorch" in message and "file too short" in message
    assert message.endswith("pip install --no-build-isolation .")


def test_something_else_that_is_missing_keeps_its_own_error(tmp_path: Path) -> None:
    (package_without_extension(tmp_path) / "ckptfused/_C.py").write_text("import nowhere")
    assert "No module named 'nowhere'" in python("import ckptfused", cwd=tmp_path).stderr.splitlines()[-1]


def test_a_python_without_its_lock_is_refused() -> None:
    run = python("import sys; sys._is_gil_enabled = lambda: False; import ckptfused")
    assert run.returncode == 1
    message = run.stderr.strip().splitlines()[-1]
    assert message.startswith("ImportError: ckptfused needs Python's global interpreter lock: expected it on, got")
    assert "PYTHON_GIL=0" in message


def test_no_machine_path_in_tracked_text() -> None:
    """The tree works wherever it is checked out."""
    for path in (
        ROOT / "setup.py",
        ROOT / "setup_cuda.py",
        ROOT / "setup_platform.py",
        ROOT / "setup_progress.py",
        ROOT / "Makefile",
        ROOT / ".ci/run",
        ROOT / "pyproject.toml",
        ROOT / "README.md",
    ):
        assert not re.search(r"/(home|root|Users)/", path.read_text()), path.name


LEFT_OUT_OF_AN_SDIST = {".ci/run", ".gitignore"}  # CI's own
MADE_FOR_AN_SDIST = re.compile(r"PKG-INFO|setup\.cfg|ckptfused\.egg-info/.*")


def backend(call: str, cwd: Path) -> str:
    """Calls the build backend, as pip and build do, and returns the name of what it made."""
    code = f"""
        import contextlib, io
        from setuptools import build_meta
        with contextlib.redirect_stdout(io.StringIO()):
            made = build_meta.{call}
        print(made)
    """
    run = python(code, cwd=cwd, CKPTFUSED_CUDA="0")
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.mark.slow
@pytest.mark.once
def test_an_sdist_has_all_that_is_tracked_and_its_metadata_build(tmp_path: Path) -> None:
    """What `make` needs of a checkout is in an sdist, too: to build the wheel, test it, measure it and lint it."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("this is no checkout")
    tracked = {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}
    for name in tracked:
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / "tree" / name)
    made = backend(f"build_sdist({str(tmp_path)!r})", tmp_path / "tree")
    assert made == f"ckptfused-{ckptfused.__version__}.tar.gz"
    with tarfile.open(tmp_path / made) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
        archive.extractall(tmp_path / "unpacked", filter="data")
    assert {name for name in names if not MADE_FOR_AN_SDIST.fullmatch(name)} == tracked - LEFT_OUT_OF_AN_SDIST
    source = tmp_path / "unpacked" / made.removesuffix(".tar.gz")
    metadata = backend(f"prepare_metadata_for_build_wheel({str(tmp_path)!r})", source)
    assert f"\nVersion: {ckptfused.__version__}\n" in (tmp_path / metadata / "METADATA").read_text()


@pytest.mark.slow
def test_the_wheel_imports_and_trains_where_the_source_is_out_of_reach(tmp_path: Path) -> None:
    # Objects compiled for this torch by `make build` are used again, so that this takes seconds.
    config = tmp_path / "build.cfg"
    config.write_text(f"[build]\nbuild_temp = build/torch-{torch.__version__.partition('+')[0]}\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    wheel = [*pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", str(tmp_path), "."]
    done = subprocess.run(
        wheel,
        cwd=ROOT,
        env=os.environ | {"DIST_EXTRA_CONFIG": str(config)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = tmp_path.glob("ckptfused-*.whl")
    site = tmp_path / "site"
    install = [*pip, "install", "--no-deps", "--no-index", "--target", str(site), str(built)]
    subprocess.run(install, cwd=tmp_path, check=True, capture_output=True)
    code = textwrap.dedent(
        """
        import torch, ckptfused
        block = ckptfused.FusedCheckpointBlock.llama(32, 2, dim_feedforward=48)
        x = torch.randn(2, 5, 32, requires_grad=True)
        block(x).square().sum().backward()
        assert x.grad.isfinite().all()
        print(ckptfused.__file__)
        """
    )
    environment = os.environ | {"PYTHONPATH": str(site)}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert Path(run.stdout.strip()).is_relative_to(site)

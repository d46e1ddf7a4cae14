"""Tests of the tests: a defect planted in a scratch build of the extension makes the suite fail.

A mutant is one exact replacement in a copy of the tree. One in ``csrc/`` is compiled with the flags of the build at
hand and linked with that build's other objects, beside copies of ``ckptfused`` and ``tests``; an existing test runs
there. The working tree and its build folder are only read: no ninja runs in them, since a second version of ninja than
the one that built would throw the build log away.

`make test` sees that each mutant can be planted, and that it runs the tests that notice them; `make mutants` plants.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import library_paths

import ckptfused
from ckptfused import _C
from tests.forks import ROOT, server
from tests.mutants.mutants import MUTANTS, Mutant

pytestmark = pytest.mark.once

# Runs pytest on the package in the current folder, never on another one that is installed or in the source tree.
PYTEST_HERE = """
import os, sys
import pytest, ckptfused._C as extension
if os.path.dirname(extension.__file__) != os.path.join(os.getcwd(), "ckptfused"):
    print("imported", extension.__file__)
    sys.exit(64)
sys.exit(pytest.main(sys.argv[1:]))
"""

# What nearly every test imports, and nothing of ckptfused.
PRELOADED = ("torch._dynamo", "pytest", "hypothesis", "transformers.models.llama.modeling_llama")


@dataclass(frozen=True)
class Build:
    """The build that the extension at hand was linked from, as its build.ninja states it."""

    compiler: list[str]
    flags: tuple[list[str], list[str]]  # before and after the file names
    objects: dict[str, Path]  # by source, relative to csrc/

    @classmethod
    def read(cls, file: Path) -> Build:
        text = file.read_text()
        values = dict(re.findall(r"^(\w+) = (.*)$", text, re.MULTILINE))
        edges = re.findall(r"^build (\S+): compile \S+/csrc/(\S+)$", text, re.MULTILINE)
        flags = shlex.split(values.get("cflags", "")), shlex.split(values.get("post_cflags", ""))
        return cls(shlex.split(values.get("cxx", "")), flags, {source: Path(output) for output, source in edges})

    def usable(self) -> bool:
        """Compiled for this torch, from this tree, and complete."""
        expected = {f'-DCKPTFUSED_TORCH_VERSION="{torch.__version__}"', f"-I{ROOT / 'csrc'}"}
        complete = bool(self.objects) and all(path.exists() for path in self.objects.values())
        return complete and expected.issubset(self.flags[0])

    def compile(self, csrc: Path, source: str, output: Path) -> None:
        """Compile one source of a copy of csrc/, which takes the place of the tree's own on the include path."""
        before = [f"-I{csrc}" if flag == f"-I{ROOT / 'csrc'}" else flag for flag in self.flags[0]]
        _run([*self.compiler, *before, "-c", str(csrc / source), "-o", str(output), *self.flags[1]])

    def link(self, objects: list[Path], output: Path) -> None:
        places = [f"-L{path}" for path in library_paths()]
        libraries = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
        _run([*self.compiler, "-shared", "-fopenmp", *map(str, objects), *places, *libraries, "-o", str(output)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"


@pytest.fixture(scope="module")
def build() -> Build:
    if sys.platform != "linux" or ckptfused.build_info()["cuda_architectures"]:
        pytest.skip("mutants are linked for Linux and the CPU only")
    if Path(_C.__file__).resolve().parent != ROOT / "ckptfused":
        pytest.skip("the extension at hand was not built in this source tree")
    found = [build for build in map(Build.read, ROOT.glob("build/*/build.ninja")) if build.usable()]
    if not found:
        pytest.skip(f"no complete ninja build for torch {torch.__version__} in build/ (make build makes one)")
    return max(found, key=lambda build: max(path.stat().st_mtime for path in build.objects.values()))


def _pytest(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run tests of a tree on its package, up to the first failure."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}  # xdist's, PYTEST_ADDOPTS
    options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-p", "no:benchmark", "-p", "no:xdist"]
    options += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    return server(*PRELOADED).python(PYTEST_HERE, tree, environment, [*options, *arguments])


def _copy(tmp_path: Path) -> Path:
    """Copy what the tests need, all but the extension; return where that belongs."""
    for folder in ("ckptfused", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.so"))
    for name in ("pyproject.toml", "setup_cuda.py"):  # tests ask the latter for the toolkit
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path / "ckptfused" / Path(_C.__file__).name


# By an assertion of the test, or of opcheck, which has its own; not by a crash on the way.
NOTICED = re.compile(
    r"tests/\S+\.py:\d+: (AssertionError|assert |Failed: DID NOT (RAISE|WARN))|\.OpCheckError: opcheck\("
)
TESTS = sorted({mutant.test for mutant in MUTANTS})


def test_every_mutant_can_be_planted(tmp_path: Path) -> None:
    for mutant in MUTANTS:
        (tmp_path / mutant.file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / mutant.file, tmp_path / mutant.file)
        mutant.plant(tmp_path)


def _not_among(items: list[str]) -> list[str]:
    return [test for test in TESTS if not any(f"{item}[".startswith(f"{test}[") for item in items)]


def test_the_suite_runs_the_tests_that_notice_them(request: pytest.FixtureRequest) -> None:
    """They are among what this run has collected; for others, where it is of few files, another collects."""
    if request.config.getoption("--all") or _not_among([item.nodeid for item in request.session.items]):
        done = _pytest(ROOT, "--collect-only", *TESTS)
        assert done.returncode == 0, done.stdout + done.stderr
        assert not _not_among([line for line in done.stdout.splitlines() if "::" in line])


@pytest.mark.extended
def test_the_same_tests_pass_on_an_unchanged_build(build: Build, tmp_path: Path) -> None:
    build.link(list(build.objects.values()), _copy(tmp_path))
    done = _pytest(tmp_path, *TESTS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.extended
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_a_mutant_is_noticed(mutant: Mutant, build: Build, tmp_path: Path) -> None:
    extension = _copy(tmp_path)
    if mutant.file.startswith("csrc/"):
        csrc, changed = tmp_path / "csrc", tmp_path / "changed.o"
        shutil.copytree(ROOT / "csrc", csrc)
        mutant.plant(tmp_path)
        source = mutant.source or str(Path(mutant.file).relative_to("csrc").with_suffix(".cpp"))
        assert source in build.objects, f"the build has no object of {source}"
        build.compile(csrc, source, changed)
        build.link([*(build.objects | {source: changed}).values()], extension)
    else:
        mutant.plant(tmp_path)
        shutil.copy(_C.__file__, extension)
    done = _pytest(tmp_path, mutant.test)
    noticed = NOTICED.search(done.stdout)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED and noticed, done.stdout + done.stderr

"""Tests of the tests: a defect planted in a scratch build of the extension makes the suite fail.

A mutant is one exact replacement in a copy of ``csrc/``. Its one source is compiled with the flags of the build at hand
and linked with that build's other objects, beside copies of ``ckptfused`` and ``tests``; then an existing test runs
there. The working tree and its build folder are only read: no ninja runs in them, since a second version of ninja than
the one that built would throw the build log away.
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
from tests.cases import TILED

ROOT = Path(__file__).resolve().parents[1]

pytestmark = [pytest.mark.slow, pytest.mark.once]

# Runs pytest on the package in the current folder, never on another one that is installed or in the source tree.
PYTEST_HERE = """
import os, sys
sys.path.insert(0, os.getcwd())
import pytest, ckptfused._C as extension
if os.path.dirname(extension.__file__) != os.path.join(os.getcwd(), "ckptfused"):
    print("imported", extension.__file__)
    sys.exit(64)
sys.exit(pytest.main(sys.argv[1:]))
"""


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


@dataclass(frozen=True)
class Mutant:
    """One defect: where it is planted, and the test that has to fail."""

    id: str
    file: str
    text: str
    defect: str
    test: str

    def plant(self, csrc: Path) -> str:
        """Change the file in a copy of csrc/; return the source to compile again."""
        file = csrc / self.file
        before = file.read_text()
        assert before.count(self.text) == 1, f"{self.file} no longer has, exactly once:\n{self.text}"
        file.write_text(before.replace(self.text, self.defect))
        return str(Path(self.file).with_suffix(".cpp"))


def _tiled(tokens: int) -> str:
    case, dtype = next((case, dtype) for case, dtype in TILED if case.tokens == tokens)
    return f"tests/test_block_oracle.py::test_ffn_tiles[{case.id}-{str(dtype)[6:]}-cpu]"


MUTANTS = (
    Mutant(
        "one residual dropout decision flipped",
        file="kernels/cpu/residual.inl",
        text="dropout_apply(row[i], draws[i], threshold, scale);",
        defect="dropout_apply(row[i],"
        " logical_row == 5 && i == 3 ? uint16_t(draws[i] < threshold ? 65535 : 0) : draws[i], threshold, scale);",
        test="tests/test_block_oracle.py::test_one_flipped_mask_bit_is_noticed",
    ),
    Mutant(
        "replay of the hidden dropout at another site",
        file="autograd/ffn.cpp",
        text="dgu.gate, dgu.up, f.act, f.p_hidden, int(DropoutSite::ffn_hidden),",
        defect="dgu.gate, dgu.up, f.act, f.p_hidden, int(DropoutSite::ffn_residual),",
        test="tests/test_block_oracle.py::test_one_flipped_mask_bit_is_noticed",
    ),
    Mutant(
        "last row tile left out of the down weight's gradient",
        file="autograd/ffn.cpp",
        text="    if (need_h) {\n",
        defect="    if (need_h && (t.row0 == 0 || t.row0 + t.rows < N_)) {\n",
        test=_tiled(33001),
    ),
    Mutant(
        "gradient of the kept gate and up written over them",
        file="autograd/ffn.cpp",
        text=": gate_up(empty({t.rows, f.gated() ? 2 * t.cols : t.cols}, P_), t);",
        defect=": gate_up(value_.gu, t);",
        test="tests/test_keep.py::test_second_backward_is_equal[all-cpu]",
    ),
    Mutant(
        "replay of an adapter's dropout at another site",
        file="autograd/adapters.cpp",
        text="s.site};",
        defect="s.site + (backward_ ? 1 : 0)};",
        test="tests/test_block_oracle.py::test_one_flipped_mask_bit_is_noticed",
    ),
    Mutant(
        "an adapter's dropout that starts anew in each tile of rows",
        file="autograd/ffn.cpp",
        text="gu_parts(t), f.transposed, t.row0);",
        defect="gu_parts(t), f.transposed);",
        test=_tiled(33500),
    ),
    Mutant(
        "ranges of rows that leave out the last block in the gradient of an adapter",
        file="ops/adapters_bwd_cpu.cpp",
        text="row < end; row += kRows) {",
        defect="row + (end < n ? kRows : 0) < end; row += kRows) {",
        test=_tiled(33500),
    ),
    Mutant(
        "ensure_mid without its replay",
        file="autograd/block.cpp",
        text="  if (value_.mid.defined()) return;\n  ensure_proj();\n",
        defect="  if (value_.mid.defined()) return;\n  if (backward_) { value_.mid = x_; return; }\n  ensure_proj();\n",
        test="tests/test_keep.py::test_every_set_of_names[pre-float32-cpu]",
    ),
    Mutant(
        "ensure_qk without RoPE in the replay",
        file="autograd/attention.cpp",
        text="  if (plain) return;\n",
        defect="  if (plain || backward_) return;\n",
        test="tests/test_block_oracle.py::test_wide_heads[128-all-float32-cpu]",
    ),
)


def _pytest(tmp_path: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    """Run tests on the copy in tmp_path, up to the first failure."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}  # xdist's, PYTEST_ADDOPTS
    command = [sys.executable, "-c", PYTEST_HERE, "-x", "-q", "--tb=line", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)


def _copy(tmp_path: Path) -> Path:
    """Copy what the tests need, all but the extension; return where that belongs."""
    for folder in ("ckptfused", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup_cuda.py"):  # tests ask the latter for the toolkit
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path / "ckptfused" / Path(_C.__file__).name


def test_the_same_tests_pass_on_an_unchanged_build(build: Build, tmp_path: Path) -> None:
    build.link(list(build.objects.values()), _copy(tmp_path))
    done = _pytest(tmp_path, sorted({mutant.test for mutant in MUTANTS}))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_a_mutant_is_noticed(mutant: Mutant, build: Build, tmp_path: Path) -> None:
    csrc, changed = tmp_path / "csrc", tmp_path / "changed.o"
    shutil.copytree(ROOT / "csrc", csrc)
    source = mutant.plant(csrc)
    assert source in build.objects, f"the build has no object of {source}"
    build.compile(csrc, source, changed)
    build.link([*(build.objects | {source: changed}).values()], _copy(tmp_path))
    done = _pytest(tmp_path, [mutant.test])
    noticed = re.search(r"tests/\S+\.py:\d+: (AssertionError|assert )", done.stdout)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED and noticed, done.stdout + done.stderr

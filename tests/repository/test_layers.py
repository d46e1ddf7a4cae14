"""Holds the arrows of the layering: in Python cli → … → modules → layer → ops → spec, in C++ autograd → block → ops →
kernels → math.

Reads the `#include`s of csrc/ and the imports of ckptfused/. A file may use its own layer and the ones listed for it.
"""

from __future__ import annotations

import ast
import graphlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "ckptfused"

# Layer of csrc/ -> the layers it may include.
CPP_MAY_USE = {
    "math": {"math"},
    "kernels": {"kernels", "math"},
    "ops": {"ops", "kernels", "math"},
    "block": {"block", "ops", "kernels", "math"},
    "autograd": {"autograd", "block", "ops", "kernels", "math"},
    "loss": {"loss", "autograd", "block", "ops", "kernels", "math"},
    "experts": {"experts", "autograd", "block", "ops", "kernels", "math"},
    "python": {"loss", "autograd", "block", "ops", "kernels", "math"},
    "tests": {"tests", "kernels", "math"},
}
# The launch of the host-run tests, which stands in for nvcc's.
ALLOWED = {("kernels/cuda/launch.cuh", "tests/host_cuda.h")}
TORCH_FREE = ("math", "kernels", "tests")
TORCH_HEADER = re.compile(r"(torch|ATen|c10|pybind11|caffe2)/|Python\.h")
CUDA_HEADER = re.compile(r"kernels/cuda/|ops/\w+_cuda\.h|(c10|ATen)/cuda/|cu(da|blas|sparse)\w*\.h$")
INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]', re.MULTILINE)

# Python modules from the bottom up; a module may import from its own line and the lines before it.
PYTHON_LAYERS = (
    ("compat", "spec", "state", "masks"),
    ("checks", "sizes"),
    ("_extension", "_C"),
    ("eager", "rng"),
    ("ffn_tiles", "triton"),
    ("cost",),
    ("ops",),
    ("recompute", "checkpoint", "offload", "loss", "functional"),
    ("layer",),
    ("modules",),
    ("explain", "info"),
    ("simulate",),
    ("models",),
    ("profiler",),
    ("planner",),
    ("convert", "doctor"),
    ("integrations",),
    ("__init__",),
    ("cli", "__main__"),
)
RANK = {name: rank for rank, names in enumerate(PYTHON_LAYERS) for name in names}


def cpp_files() -> list[Path]:
    return sorted(path for path in CSRC.rglob("*") if path.suffix in {".h", ".inl", ".cpp", ".cu", ".cuh"})


def python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def layer_of(path: Path) -> str:
    """The first folder below csrc/, or the module or package just below ckptfused/."""
    top = path.relative_to(CSRC if path.is_relative_to(CSRC) else PACKAGE).parts[0]
    return top.removesuffix(".py")


def wrong_includes(layer: str, text: str) -> list[str]:
    """The includes of a file of this layer that point up or sideways."""
    found = []
    for mark, header in INCLUDE.findall(text):
        if TORCH_HEADER.match(header):
            if layer in TORCH_FREE:
                found.append(header)
        elif mark == '"' and header.split("/")[0] not in CPP_MAY_USE[layer]:
            found.append(header)
    return found


def cuda_includes(path: Path, text: str) -> list[str]:
    """The includes of a file of ops/ or autograd/ that a CPU build cannot follow: they belong in *_cuda files."""
    if path.stem.endswith("_cuda"):
        return []
    return [header for _, header in INCLUDE.findall(text) if CUDA_HEADER.match(header)]


def imported(path: Path) -> list[str]:
    """What a module imports of its own package, by dotted names; imports for type checking count as well."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{source}.{alias.name}" for alias in node.names]
            found.extend(name if is_module(name) else source for name in names)
    return [name for name in found if name.split(".")[0] == package[0]]


def layer_named(name: str) -> str:
    """The module or package just below ckptfused that a dotted name is in; `__init__` for ckptfused itself."""
    return [*name.split("."), "__init__"][1]


def is_module(name: str) -> bool:
    """Whether a dotted name is a module or package here; the extension counts, built or not."""
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists() or name == "ckptfused._C"


def test_includes_point_down() -> None:
    files = {str(path.relative_to(CSRC)): path for path in cpp_files()}
    homeless = {layer_of(path) for path in files.values()} - CPP_MAY_USE.keys()
    assert not homeless, f"no place in the layering, CPP_MAY_USE, for folders of csrc: {homeless}"
    wrong = {name: wrong_includes(layer_of(path), path.read_text()) for name, path in files.items()}
    assert {(name, header) for name, headers in wrong.items() for header in headers} == ALLOWED


def test_a_cpu_build_needs_no_cuda_header() -> None:
    paths = [path for path in cpp_files() if layer_of(path) not in {"kernels", "math", "tests"}]
    assert {path.name: found for path in paths if (found := cuda_includes(path, path.read_text()))} == {}
    for header in ('"kernels/cuda/norm.h"', '"ops/launch_cuda.h"', "<c10/cuda/CUDAGuard.h>", "<cuda_runtime_api.h>"):
        assert cuda_includes(CSRC / "ops/norm.h", f"#include {header}\n")
        assert not cuda_includes(CSRC / "ops/norm_cuda.cpp", f"#include {header}\n")


def test_imports_point_down() -> None:
    files = {path: [layer_named(name) for name in imported(path)] for path in python_files()}
    homeless = {layer_of(path) for path in files}.union(*files.values()) - RANK.keys()
    assert not homeless, f"no place in the layering, PYTHON_LAYERS, for modules of ckptfused: {homeless}"
    wrong = [(path, name) for path, names in files.items() for name in names if RANK[name] > RANK[layer_of(path)]]
    assert not wrong


def test_tests_and_benchmarks_do_not_import_one_another() -> None:
    for folder, other in (("tests", "benchmarks"), ("benchmarks", "tests")):
        wrong = re.compile(rf"^\s*(from|import) {other}\b", re.MULTILINE)
        files = sorted((ROOT / folder).rglob("*.py"))
        assert files and not [path for path in files if wrong.search(path.read_text())]


@pytest.mark.parametrize("folder", ["ckptfused", "benchmarks"])
def test_no_modules_import_one_another(folder: str) -> None:
    """In a circle, that is; not even for type checking or inside a function."""
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    circle_in({dotted(path): imported(path) for path in files})


def test_no_layers_import_one_another() -> None:
    """Not by way of different modules either."""
    used: dict[str, list[str]] = {}
    for path in python_files():
        used.setdefault(layer_of(path), []).extend(map(layer_named, imported(path)))
    circle_in(used)


def test_the_tree_of_the_page_is_the_real_one() -> None:
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    tree = page[page.index("```text\ncsrc/") :].split("```")[1]
    named = dict.fromkeys(re.findall(r"^  (\S+)  ", tree, re.MULTILINE))
    folders = [
        path for top in (CSRC, PACKAGE) for path in top.iterdir() if path.is_dir() and path.name != "__pycache__"
    ]
    modules = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py", "__main__.py"}
    assert named.keys() == {f"{path.name}/" for path in folders} | modules


def test_rooms_are_small() -> None:
    """Sub-rooms count by themselves."""
    rooms: dict[Path, list[int]] = {}
    for path in python_files():
        rooms.setdefault(path.parent, []).append(path.read_text().count("\n"))
    top = rooms.pop(PACKAGE)
    assert len(top) <= 13
    assert {
        room.name: (len(lines), sum(lines)) for room, lines in rooms.items() if len(lines) > 18 or sum(lines) > 3300
    } == {}


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    first = function.body[0]
    docstring = first.end_lineno - first.lineno + 1 if ast.get_docstring(function) and first.end_lineno else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def too_long(tree: ast.Module) -> list[str]:
    """The functions above 60 lines, and kernels (whose decorator is one of Triton's) above 150."""
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    limits = ((f, 150 if any("triton" in ast.unparse(d) for d in f.decorator_list) else 60) for f in functions)
    return [f.name for f, limit in limits if lines_of(f) > limit]


def test_files_and_functions_are_short() -> None:
    ours = [*python_files(), *sorted((ROOT / "benchmarks").rglob("*.py"))]
    files = [*ours, *(path for path in cpp_files() if layer_of(path) != "tests")]
    assert [str(path) for path in files if path.read_text().count("\n") > 300] == []
    found = {str(path): too_long(ast.parse(path.read_text())) for path in ours}
    assert {path: names for path, names in found.items() if names} == {}


def test_a_long_function_is_seen() -> None:
    body = "    x = 1\n" * 60
    assert too_long(ast.parse(f'def f():\n    """Words\n    of it."""\n{body}')) == ["f"]
    assert too_long(ast.parse(f'def f():\n    """Words\n    of it."""\n{body[10:]}')) == []
    assert too_long(ast.parse(f"@triton.jit\ndef f():\n{body}")) == []
    assert too_long(ast.parse(f"@triton.jit(x=1)\ndef f():\n{body * 3}")) == ["f"]


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def circle_in(imports: dict[str, list[str]]) -> None:
    """**Raises** `graphlib.CycleError` with the modules that import one another."""
    graphlib.TopologicalSorter({name: set(used) - {name} for name, used in imports.items()}).prepare()


def test_there_is_something_to_hold() -> None:
    assert {layer_of(path) for path in cpp_files()} >= {"math", "kernels", "ops", "block", "autograd"}
    assert {layer_of(path) for path in python_files()} >= {"functional", "modules", "cli", "eager"}


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        ("math", '#include "kernels/cpu/norm.h"'),
        ("kernels", "#include <ATen/ATen.h>"),
        ("kernels", '#include "ops/checks.h"'),
        ("ops", '#include "block/block.h"'),
        ("block", '#include "autograd/function.h"'),
        ("autograd", '  # include "tests/norm.h"'),
        ("tests", '#include "torch/library.h"'),
    ],
)
def test_a_wrong_include_is_seen(layer: str, line: str) -> None:
    assert wrong_includes(layer, f"#pragma once\n{line}\n")


def test_a_wrong_import_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path / "ckptfused")
    for folder in ("modules", "cli"):
        (tmp_path / "ckptfused" / folder).mkdir(parents=True)
    path = tmp_path / "ckptfused" / "eager.py"
    path.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from .cli import main\n"
        "def late():\n    from . import modules\n    from ckptfused import FusedCheckpointBlock\n"
    )
    assert sorted(imported(path)) == ["ckptfused", "ckptfused.cli", "ckptfused.modules"]
    assert sorted(map(layer_named, imported(path))) == ["__init__", "cli", "modules"]


def test_a_circle_is_seen() -> None:
    with pytest.raises(graphlib.CycleError):
        circle_in({"a": ["b"], "b": ["c"], "c": ["a"]})
    circle_in({"a": ["b", "c", "a"], "b": ["c"]})

"""Names that other libraries keep to themselves are in ckptfused/compat alone, with the versions that have them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "ckptfused"
LIBRARIES = ("torch", "transformers", "peft", "accelerate", "timm", "triton", "lightning", "trl")
# What nobody will rename: the dicts that pickles of all nn.Modules have, two attributes that PyTorch's documentation of
# in-place operations and views names, and Python's own for named tuples, whose underscore keeps fields apart.
STABLE = {"_modules", "_parameters", "_buffers", "_version", "_base", "_replace", "_asdict", "_make", "_getframe"}
# Packages of transformers that its users import from, models' own modules among them: adapters name what they read.
OPEN = re.compile(r"transformers(\.models(\.\w+\.(modeling|modular)_\w+.*)?)?")
BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "patched", "attrgetter", "get", "pop"}
# (file, name): what may stay, and why.
ALLOWED = {
    ("_extension.py", "_is_gil_enabled"): "documented from Python 3.13 on, and absent before",
    ("modules/block.py", "_sa_block"): "a subclass calls what it inherits",
    ("modules/block.py", "_ff_block"): "likewise",
}


def is_private(name: str) -> bool:
    return bool(re.fullmatch(r"_[A-Za-z]\w*", name))


def own_names(trees: list[ast.Module]) -> set[str]:
    """The private names that this package itself gives to functions, classes, modules, variables and attributes."""
    found: set[str] = {"_C", "_extension"}
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return {name for name in found if is_private(name)}


def dotted(node: ast.AST) -> str:
    """`torch.ops.aten` of the expression; a name that is no chain of attributes counts for nothing."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def private_names(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """The names in a module that belong to another library, and that it does not document."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            chain = dotted(node)
            ours = node.attr in own and not chain.startswith("torch.")
            # Operations are in PyTorch's public list whatever their names begin with.
            if not ours and not re.search(r"\b(_?aten|_ATEN)\.\w+$", chain):
                yield node.attr
        elif isinstance(node, ast.Import | ast.ImportFrom):
            source = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                parts = [part for part in f"{source}.{alias.name}".split(".") if part]
                theirs = parts[0] in LIBRARIES and not (isinstance(node, ast.ImportFrom) and node.level)
                if theirs and (any(map(is_private, parts)) or not _is_open(source or alias.name)):
                    yield ".".join(parts)
        elif isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in BY_NAME:
            texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            yield from (text for text in texts if is_private(text) and text not in own)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            place = re.fullmatch(rf"({'|'.join(LIBRARIES)})(\.\w+)+", node.value)
            if place and (any(map(is_private, node.value.split("."))) or not _is_open(node.value)):
                yield node.value


def _is_open(place: str) -> bool:
    """Whether a module of another library is one that its users import: all of those below `transformers.x` are not."""
    if place.startswith(("transformers.", "peft.", "accelerate.")):
        return bool(OPEN.fullmatch(place))
    return True


def modules() -> dict[str, ast.Module]:
    files = sorted(PACKAGE.rglob("*.py"))
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in files}


@pytest.mark.slow
def test_private_names_of_others_are_in_compat() -> None:
    trees = modules()
    own = own_names([tree for name, tree in trees.items() if not name.startswith("compat/")])
    found = {
        (file, name)
        for file, tree in trees.items()
        if not file.startswith("compat/")
        for name in private_names(tree, own | STABLE)
    }
    assert found == ALLOWED.keys()


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("torch._C._len_torch_dispatch_stack()", ["_len_torch_dispatch_stack", "_C"]),
        ("storage._cdata", ["_cdata"]),
        ("from torch.utils._pytree import tree_map", ["torch.utils._pytree.tree_map"]),
        ("from transformers.modeling_layers import GradientCheckpointingLayer", ["transformers.modeling_layers.Gradi"]),
        ("sys.modules.get('transformers.modeling_utils')", ["transformers.modeling_utils"]),
        ("getattr(config, '_attn_implementation', None)", ["_attn_implementation"]),
        ("vars(module).get('_is_fsdp_managed_module')", ["_is_fsdp_managed_module"]),
        ("layer._own; self._own = 1; aten._softmax; torch.ops.aten._grouped_mm; t._version; pair._replace(a=1)", []),
        ("from transformers import AutoConfig; from torch.utils.checkpoint import checkpoint", []),
        ("from ckptfused.compat.transformers import collects; from .transformers import collects", []),
    ],
)
def test_a_private_name_is_seen(line: str, seen: list[str]) -> None:
    tree = ast.parse(line)
    found = list(private_names(tree, own_names([tree]) | STABLE))
    assert len(found) == len(seen) and all(name.startswith(part) for name, part in zip(found, seen, strict=True))


def test_compat_says_of_each_name_where_it_is() -> None:
    """Every function's docstring, or its module's for all that it has, names versions."""
    version = re.compile(r"\d+\.\d+")
    for path in sorted((PACKAGE / "compat").glob("*.py")):
        if path.stem in ("__init__", "patches", "kernels", "versions"):
            continue
        tree = ast.parse(path.read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node in tree.body]
        everywhere = version.search(ast.get_docstring(tree) or "")
        assert everywhere or all(version.search(ast.get_docstring(f) or "") for f in functions if f.name[0] != "_"), (
            path
        )

"""A public name is defined in one room: whoever searches for it finds one place, whatever he imports it from."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "ckptfused"
# The same stem runs through all layers; each command has the same two functions; type variables and programs are no
# names that anybody looks for.
SHARED = {"activation", "attention", "ffn", "norm", "add_arguments", "run", "main", "T"}


def public_names(tree: ast.Module) -> Iterator[str]:
    """Functions, classes and constants of a module without an underscore before them; imports are none."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = (each for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))
            found = [each.id for each in names if isinstance(each.ctx, ast.Store)]
        else:
            continue
        yield from (name for name in found if not name.startswith("_"))


def in_two_rooms(package: Path) -> dict[str, list[str]]:
    """The public names that more than one folder defines, and these folders."""
    rooms: dict[str, set[str]] = {}
    for path in package.rglob("*.py"):
        for name in public_names(ast.parse(path.read_text())):
            rooms.setdefault(name, set()).add(str(path.parent.relative_to(package)))
    return {name: sorted(found) for name, found in rooms.items() if len(found) > 1}


def test_a_public_name_is_in_one_room() -> None:
    found = in_two_rooms(PACKAGE)
    assert {name: rooms for name, rooms in found.items() if name not in SHARED} == {}
    assert found.keys() >= SHARED, "names that may be in two rooms and are not"


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("def one(): pass", ["one"]),
        ("class One: two = 1", ["One"]),
        ("A, (B, _C) = D[0] = f()", ["A", "B"]),
        ("Kind: type = int", ["Kind"]),
        ("from a import b\nimport c\n_d = 1\nif b:\n    e = 1", []),
    ],
)
def test_a_public_name_is_seen(line: str, seen: list[str]) -> None:
    assert list(public_names(ast.parse(line))) == seen


def test_a_name_in_two_rooms_is_seen(tmp_path: Path) -> None:
    for file in ("a/one.py", "a/two.py", "b/one.py", "three.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("def f(): pass\n" + f"{Path(file).stem} = 1\n")
    assert in_two_rooms(tmp_path) == {"f": [".", "a", "b"], "one": ["a", "b"]}

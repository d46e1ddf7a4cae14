"""An extension that was made elsewhere is used where it fits, and nowhere else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import extension
from benchmarks.gpu.__main__ import prebuilt


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A folder with a build for this Python, PyTorch and source."""
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / extension.name()).write_bytes(b"code")
    (folder / "_C.json").write_text(json.dumps(extension.here()))
    return folder


def test_one_that_fits_is_put_in_its_place(made: Path, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    assert extension.place(made, package) == ""
    assert (package / extension.name()).read_bytes() == b"code"
    assert [path.name for path in package.iterdir()] == [extension.name()]


@pytest.mark.parametrize("what", ["Python", "PyTorch", "CUDA", "C++11 ABI", "sources"])
def test_one_for_another_is_not(made: Path, tmp_path: Path, what: str) -> None:
    record = json.loads((made / "_C.json").read_text())
    (made / "_C.json").write_text(json.dumps(record | {what: "another"}))
    assert extension.place(made, tmp_path).startswith(f"made for another one: {what} another, here ")
    assert not (tmp_path / extension.name()).exists()


def test_one_that_is_not_there_is_not(tmp_path: Path) -> None:
    assert extension.place(tmp_path, tmp_path).startswith(f"no {extension.name()} in ")
    (tmp_path / extension.name()).write_bytes(b"code without a record")
    assert extension.unfit(tmp_path).startswith("no ")


def test_one_that_cannot_be_imported_is_built_again(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.gpu import __main__ as command

    monkeypatch.setattr(extension, "place", lambda: "")
    for said, expected in (("undefined symbol", None), ("", "ok")):
        monkeypatch.setattr(command, "built_for", lambda capability, said=said: said)
        outcome = prebuilt("9.0")
        assert (outcome and outcome.status) == expected


def test_any_source_changes_the_digest(tmp_path: Path) -> None:
    shutil.copytree(extension.ROOT / "csrc", tmp_path / "csrc")
    for name in ("setup.py", "setup_cuda.py"):
        shutil.copy(extension.ROOT / name, tmp_path)
    before = extension.digest(tmp_path)
    assert before == extension.digest()
    test = tmp_path / "csrc" / "tests" / "test_norm.cpp"
    test.write_text(test.read_text() + "// more")
    assert extension.digest(tmp_path) == before  # no part of it
    header = tmp_path / "csrc" / "math" / "norm.h"
    header.write_text(header.read_text() + "// more")
    assert extension.digest(tmp_path) != before


@pytest.mark.parametrize("fault", ["", "changed", "large"])
def test_what_a_build_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """A compiler that only writes a file leaves a record of the sources as they were when it began, or none."""
    folder = tmp_path / "ckptfused"

    def build(command: list[str], **options: Any) -> None:
        assert command[-2:] == ["--build-lib", str(tmp_path)]
        assert options["env"]["TORCH_CUDA_ARCH_LIST"] == "9.0" and options["env"]["CKPTFUSED_CUDA"] == "1"
        folder.mkdir()
        (folder / extension.name()).write_bytes(b"code")
        if fault == "changed":
            monkeypatch.setattr(extension, "digest", lambda: "another")

    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(extension, "ROOT", tmp_path)
    monkeypatch.setattr(extension, "FOLDER", folder)
    monkeypatch.setattr(extension, "digest", lambda: "these")
    monkeypatch.setattr(extension, "MOST", 3 if fault == "large" else 40)
    monkeypatch.setattr(extension.subprocess, "run", build)
    if fault:
        with pytest.raises(SystemExit, match="changed while" if fault == "changed" else "fewer architectures"):
            extension.main()
        assert not (folder / "_C.json").exists()
    else:
        extension.main()
        assert json.loads((folder / "_C.json").read_text())["bytes"] == 4
        assert extension.unfit(folder) == ""

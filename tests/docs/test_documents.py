"""Every code block of the documents runs; what they name exists; their tables are those of the results."""

from __future__ import annotations

import ast
import json
import linecache
import re
import shlex
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ckptfused import CheckpointPolicy
from ckptfused.cli import main
from ckptfused.models.family import FAMILIES
from tests import forks, tools
from tests.docs.pages import FENCE, PAGES, ROOT, Block, blocks, name, named_files

pytestmark = pytest.mark.once

with_python = [page for page in PAGES if any(block.language == "python" for block in blocks(page))]
LANGUAGES = {"python", "console", "text"}


def packages(code: str) -> set[str]:
    """The top-level packages that a block imports."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def execute(page: Path, block: Block, names: dict[str, Any]) -> None:
    """Runs a block such that tracebacks, and whoever reads the source of its classes, find its lines."""
    file = f"{name(page)}:{block.line}"
    linecache.cache[file] = (len(block.text), None, block.text.splitlines(keepends=True), file)
    exec(compile(block.text, file, "exec"), names)


@pytest.fixture
def small_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is downloaded: a small Qwen3 takes the place of weights from the hub."""
    if not tools.installed("transformers"):
        return
    import transformers

    from tests.models import zoo_llama  # noqa: F401
    from tests.models.zoo import ZOO
    from tests.quantized import Way, quantize_linears

    def small(*args: Any, dtype: Any = None, quantization_config: Any = None, **kwargs: Any) -> Any:
        model = ZOO["qwen3"].make(0.0, "sdpa")
        if quantization_config is None:
            return model
        quantize_linears(model.to(dtype), Way("nf4", nested=True), dtype)
        return model

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", small)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("page", with_python, ids=name)
def test_code_runs(
    page: Path,
    small_hub: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The Python blocks of a page run one after the other, as somebody would who reads it from top to bottom.

    A block of text titled "prints" is what the block before it prints.
    """
    found = blocks(page)
    tools.need(*set.union(*(packages(block.text) for block in found if block.language == "python")))
    monkeypatch.chdir(tmp_path)
    before = dict(FAMILIES)
    names: dict[str, Any] = {"__name__": "document"}
    try:
        for block in found:
            if block.language == "python":
                capsys.readouterr()
                execute(page, block, names)
            elif block.title == 'title="prints"':
                printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
                assert printed == [line.rstrip() for line in block.text.splitlines()], f"line {block.line}"
    finally:
        FAMILIES.clear()
        FAMILIES.update(before)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_fences_say_their_language(page: Path) -> None:
    found = blocks(page)
    assert 2 * len(found) == len(re.findall(r"^ *```", page.read_text(), re.MULTILINE))
    assert {block.language for block in found} <= LANGUAGES


def targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def wrong_words(line: str) -> list[str]:
    """What a line of a shell block names and the repository has not."""
    words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)]
    if not words:
        return []
    command, *rest = words
    if command == "make":
        return [word for word in rest if word not in targets()]
    if command in ("python", "torchrun", "bash"):
        files = [word for word in rest if re.search(r"\.(py|sh)$|/run$", word)]
        if "-m" in rest and rest[rest.index("-m") + 1] == "ckptfused":
            known = {path.stem for path in (ROOT / "ckptfused/cli").glob("[a-z]*")}
            return [word for word in rest[rest.index("-m") + 2 :][:1] if word not in known]
        return [file for file in files if not (ROOT / file).exists()]
    return [] if command in ("pip", "git", "cd", "pre-commit", ".ci/run") else [command]


def test_shell_blocks_name_what_exists() -> None:
    lines = [
        (name(page), line)
        for page in PAGES
        for block in blocks(page)
        if block.language == "console"
        for line in block.text.splitlines()
    ]
    assert len(lines) > 10
    assert [(page, line) for page, line in lines if wrong_words(line)] == []


def test_wrong_shell_lines_are_seen() -> None:
    for line in ("make nothing", "python nowhere.py", "python -m ckptfused nothing", "rm -rf x"):
        assert wrong_words(line)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    assert [file for file in named_files(page) if not (ROOT / file).exists()] == []


def test_the_readme_fits_on_two_screens() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    for table in ("step", "whole-step"):
        assert lines.index(f"<!-- end: {table} -->") - lines.index(f"<!-- begin: {table} -->") > 1, "make pictures"
    assert len(lines) <= 120


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_code_is_not_wider_than_a_screen(page: Path) -> None:
    assert [line for block in blocks(page) for line in block.text.splitlines() if len(line) > 120] == []


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if ROOT / "docs" in page.parents}


def test_tables_are_those_of_the_results() -> None:
    run = forks.command("-m", "benchmarks", "draw", "--check")
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_the_table_of_families_is_what_its_command_prints() -> None:
    tools.need("transformers")
    run = forks.command("-m", "benchmarks", "families")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("\n") > 15
    assert run.stdout in (ROOT / "docs/convert.md").read_text()


@pytest.mark.slow
def test_the_plans_of_llama_3_8b_are_what_their_commands_print(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The rows of all weights, made anew: those of LoRA follow from the same code, and take five times as long."""
    tools.need("transformers", "rich")
    text = (ROOT / "docs/budget.md").read_text()
    commands = re.findall(r"^python -m ckptfused (plan --config llama-3-8b .*)$", text, re.M)
    rows = re.findall(r"^\| ((?:all weights|LoRA), .*) \|$", text, re.M)
    assert len(commands) == len(rows) == 4
    for command, row in zip(commands[:2], rows[:2], strict=True):
        trained, budget, peak, seconds, layers, each, none = row.split(" | ")
        words = shlex.split(command.partition(" --plot")[0])
        assert trained.endswith(words[-1]) and budget.replace(" ", "") in words
        assert main([*words, "--json", "--policy", str(tmp_path / "policy.json")]) == 0
        found = json.loads(capsys.readouterr().out)
        points = {point["name"]: (f"{point['peak'] / 2**30:.2f} GiB", point["seconds"]) for point in found["standard"]}
        assert [peak, seconds] == [f"{found['peak'] / 2**30:.2f} GiB", f"{found['seconds']:.2f}"]
        assert [each, none] == ["{}, {:.2f} s".format(*points["per layer"]), points["none"][0]]
        modes = CheckpointPolicy.from_json((tmp_path / "policy.json").read_text()).layers
        said = {keep: int(count or 32) for count, keep in re.findall(r'(\d*) ?`"([^"]+)"`', layers)}
        assert said == Counter(mode.keep for mode in modes)


def test_no_document_cites_a_page_of_another_repository() -> None:
    """Sources, too, cite the documents that lie beside them."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    files = [ROOT / file for file in tracked.split() if Path(file).suffix in {".py", ".h", ".cpp", ".inl", ".md"}]
    cited = re.compile(r"\b(DESIGN|COST|STYLE)(\.md\b| sections? \d| of the design)")
    assert [name(file) for file in files if file.exists() and cited.search(file.read_text())] == []


def test_fences_are_found() -> None:
    text = "a\n\n    ```python title='x'\n    f()\n    ```\n```text\nb\n```\n"
    assert [m[2] for m in FENCE.finditer(text)] == ["python", "text"]

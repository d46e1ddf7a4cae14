"""The documents: their code blocks, and the files that they name."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/**/*.md"))
FENCE = re.compile(r"^( *)```([\w.+-]*)([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
FOLDERS = ("benchmarks", "ckptfused", "cmake", "csrc", "docs", "examples", "tests")
FILE = re.compile(r"[\w./-]+")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the rest of the opening line, its text, and the number of its first line."""

    language: str
    title: str
    text: str
    line: int


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(m[2], m[3].strip(), textwrap.dedent(m[4]), text.count("\n", 0, m.start(4)) + 1)
        for m in FENCE.finditer(text)
    ]


def named_files(page: Path) -> list[str]:
    """What a page names between backticks or as the target of a link that lies, or should lie, in the repository."""
    text = FENCE.sub("", page.read_text())
    quoted = [word.split("::")[0] for word in re.findall(r"`([^`\n]+)`", text)]
    found = [word for word in quoted if FILE.fullmatch(word) and word.split("/")[0] in FOLDERS and "/" in word]
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if not re.match(r"\w+:", target):
            found.append((page.parent / target).resolve().relative_to(ROOT).as_posix())
    return found

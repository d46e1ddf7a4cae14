"""The page of architectures is what its command prints of the code as it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.architecture_models import Subject
from benchmarks.architectures import LIMIT, SECTIONS, swept

pytestmark = [pytest.mark.once, pytest.mark.filterwarnings("ignore")]

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "architectures.md").read_text(encoding="utf-8")
PARTS = dict(part.split("\n", 1) for part in PAGE.split("\n## ")[1:])
LEAST = {"Decoders": 60, "Encoders and towers": 20, "Blocks by others": 12}
"""How many of each part are to be fused whole."""
AGAIN = {
    "Decoders": ("olmo2", "gpt_neox", "gpt_oss"),
    "Encoders and towers": ("vit", "whisper", "xlm_roberta", "t5", "mobilebert"),
    "Blocks by others": ("nanoGPT", "minGPT", "lit-llama", "Meta's Llama"),
}


def rows(part: str) -> list[list[str]]:
    """The cells of a table of the page."""
    lines = [line for line in PARTS[part].splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


@pytest.mark.parametrize("part", SECTIONS)
def test_enough_is_fused_and_all_else_says_why(part: str) -> None:
    found = rows(part)
    whole = [row for row in found if re.fullmatch(r"\d+ fused", row[2])]
    ran = [row for row in found if row[2] != "–"]
    assert len(whole) >= LEAST[part]
    assert f"\n{len(ran)} {SECTIONS[part][0]} ran: " in PARTS[part] and f"{len(whole)} fused" in PARTS[part]
    assert not [row[0] for row in found if row not in whole and not row[7]]
    assert not [row[0] for row in ran if not float(row[6]) <= LIMIT]


@pytest.mark.parametrize("part", SECTIONS)
def test_rows_are_of_the_code_as_it_is(part: str) -> None:
    """Some of each part, swept again: a row is as the page has it, the rounding of gradients aside."""
    transformers = pytest.importorskip("transformers")
    if f"\n{transformers.__version__}: " not in PAGE:
        pytest.skip("the page is of another version of transformers")
    known = {(subject.name, subject.kind): subject for subject in SECTIONS[part][2]()}
    again = [row for row in rows(part) if row[0] in AGAIN[part]]
    assert again
    for row in again:
        made = str(swept(known[row[0], row[1]]))
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", made)[1:-1]]
        assert cells[:6] == row[:6] and cells[7] == row[7]
        assert float(cells[6]) <= LIMIT


def test_a_model_that_does_not_run_says_so() -> None:
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'vit'")

    subject = Subject("a name", "ViT", missing, lambda model: model)  # type: ignore[arg-type]
    assert "does not run as it is: ModuleNotFoundError: No module named 'vit'" in str(swept(subject))

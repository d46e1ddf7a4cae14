"""The README's examples of convert run as they stand."""

from __future__ import annotations

import linecache
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

import transformers

from tests.convert import zoo_llama  # noqa: F401
from tests.convert.zoo import ZOO

README = Path(__file__).resolve().parents[2] / "README.md"
SECTION = README.read_text().partition("## An existing model")[2].partition("\n## ")[0]
EXAMPLES = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)


def execute(code: str, names: dict[str, Any]) -> None:
    """Runs an example such that the source of its classes can be read, as in a file."""
    name = f"<README {hash(code)}>"
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    exec(compile(code, name, "exec"), names)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_examples(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(EXAMPLES) == 4
    # Nothing is downloaded: a small model of the same family takes the place of the weights.
    small = ZOO["qwen3"].make(0.0, "sdpa")
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda name: small)
    names: dict[str, Any] = {"__name__": "readme_example"}
    for code, layers in zip(EXAMPLES, (3, 2, 2, 3), strict=True):
        execute(code, names)
        assert f"{layers} layers: {layers} fused" in capsys.readouterr().out
        assert all(len(line) <= 120 for line in code.splitlines())


def test_own_layer() -> None:
    """The adapter of the last example computes what its layer does."""
    import copy

    import ckptfused
    from ckptfused.convert.family import FAMILIES

    FAMILIES.pop("mine", None)
    names: dict[str, Any] = {"__name__": "readme_example"}
    execute(EXAMPLES[-1], names)
    torch.manual_seed(0)
    model = names["nn"].Sequential(*(names["MyLayer"](64, 4) for _ in range(3)))
    ours = copy.deepcopy(model)
    assert ckptfused.convert(ours).fused == 3
    x = torch.randn(2, 9, 64)
    for m in (model, ours):
        m(x).square().sum().backward()
    for p, q in zip(model.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-4)
    names["MyLayer"].forward = lambda self, x: x
    try:
        assert ckptfused.convert(ours).fused == 0
    finally:
        FAMILIES.pop("mine", None)

"""The build: its errors, its metadata, and the wheel in an environment where the source tree is out of reach."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import ckptfused

ROOT = Path(__file__).resolve().parents[1]


def python(code: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_build_without_torch_says_what_to_do() -> None:
    run = python("import sys, runpy; sys.modules['torch'] = None; runpy.run_path('setup.py')")
    assert run.returncode != 0
    assert "--no-build-isolation" in run.stderr
    assert "torch >= 2.11" in run.stderr
    assert "Traceback" not in run.stderr


def test_build_requirements_do_not_pull_another_torch() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    requires = re.search(r"^requires = \[(.*)\]$", text, re.MULTILINE)
    assert requires is not None
    assert "torch" not in requires.group(1)


def test_build_info_says_what_was_built() -> None:
    info = ckptfused.build_info()
    assert info["version"] == ckptfused.__version__
    assert info["torch"] == torch.__version__
    assert list(info["cuda_architectures"]) == []


def test_another_torch_gives_one_clear_error() -> None:
    run = python("import torch; torch.__version__ = type(torch.__version__)('9.9.9'); import ckptfused")
    assert run.returncode != 0
    message = run.stderr.strip().splitlines()[-1]
    assert message.startswith("ImportError")
    assert "9.9.9" in message
    assert torch.__version__ in message


def test_no_machine_path_in_tracked_text() -> None:
    """The tree works wherever it is checked out."""
    for path in (ROOT / "setup.py", ROOT / "Makefile", ROOT / ".ci/run", ROOT / "pyproject.toml", ROOT / "README.md"):
        assert not re.search(r"/(home|root|Users)/", path.read_text()), path.name


@pytest.mark.slow
def test_the_wheel_imports_and_trains_where_the_source_is_out_of_reach(tmp_path: Path) -> None:
    # Objects compiled for this torch by `make build` are used again, so that this takes seconds.
    config = tmp_path / "build.cfg"
    config.write_text(f"[build]\nbuild_temp = build/torch-{torch.__version__.partition('+')[0]}\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    wheel = [*pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", str(tmp_path), "."]
    done = subprocess.run(
        wheel,
        cwd=ROOT,
        env=os.environ | {"DIST_EXTRA_CONFIG": str(config)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = tmp_path.glob("ckptfused-*.whl")
    site = tmp_path / "site"
    install = [*pip, "install", "--no-deps", "--no-index", "--target", str(site), str(built)]
    subprocess.run(install, cwd=tmp_path, check=True, capture_output=True)
    run = python(
        """
        import torch, ckptfused
        block = ckptfused.FusedCheckpointBlock.llama(32, 2, dim_feedforward=48)
        x = torch.randn(2, 5, 32, requires_grad=True)
        block(x).square().sum().backward()
        assert x.grad.isfinite().all()
        print(ckptfused.__file__)
        """,
        cwd=tmp_path,
        PYTHONPATH=str(site),
    )
    assert run.returncode == 0, run.stderr
    assert Path(run.stdout.strip()).is_relative_to(site)

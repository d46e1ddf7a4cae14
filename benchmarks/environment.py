"""What a result file says about where it came from."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]


def git(*arguments: str) -> str:
    run = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return run.stdout.strip() if run.returncode == 0 else "unknown"


def processor() -> dict[str, str]:
    """Model name and the instruction sets that decide bf16 speed."""
    fields: dict[str, str] = {}
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    flags = set(fields.get("flags", "").split())
    known = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_fp16")
    return {
        "model": fields.get("model name", platform.processor() or platform.machine()),
        "instructions": " ".join(name for name in known if name in flags),
    }


def describe(command: str) -> dict[str, Any]:
    """Commit, versions and device of this run, and the command that made it."""
    import ckptfused

    changed = git("status", "--porcelain", "--untracked-files=no")
    return {
        "commit": git("rev-parse", "HEAD") + (" with changes" if changed and changed != "unknown" else ""),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ckptfused": ckptfused.__version__,
        "cpu": processor(),
        **({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "command": command,
    }


def footer(where: dict[str, Any], name: str) -> str:
    """The last line of a page of results: from what `describe` said, and the command that measures it again."""
    own = f"python -m benchmarks {name}"
    again = "" if where["command"].startswith(own) else f"; again by `{own}`"
    gpu = f"{where['gpu']}; " if "gpu" in where else ""
    return (
        f"{gpu}{where['cpu']['model']} ({where['cpu']['instructions']}), {where['threads']} threads; "
        f"torch {where['torch']}, ckptfused {where['ckptfused']}, commit {where['commit']}: "
        f"`{where['command']}`{again}."
    )

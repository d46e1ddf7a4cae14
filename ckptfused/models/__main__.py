"""`python -m ckptfused.models module.Class …`: writes down the forwards of these classes as they are installed.

`module.Class:method` writes down another method that an adapter stands in for (`Family.methods`), `module.function` a
function that a model holds. The file is layer/known.json of the ckptfused that is imported.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import sys
from typing import Any

from ckptfused.layer.source import KNOWN_FILE, fingerprint, known_code, note_functions


def main(names: list[str]) -> None:
    """Adds the fingerprint of each class's forward, or of the method that is named, to known.json, and those of the
    functions that it calls."""
    found = known_code()
    for named in names:
        name, _, method = named.partition(":")
        holder, said = _holder(name)
        function = getattr(holder, method or "forward", holder)
        found["functions" if function is holder else "classes"].setdefault(name, {}).setdefault(
            fingerprint(function), said
        )
        note_functions(found, function, said)
    for kind in ("classes", "functions"):
        found[kind] = dict(sorted(found[kind].items()))
    KNOWN_FILE.write_text(json.dumps(found, indent=1) + "\n")


def _holder(name: str) -> tuple[Any, str]:
    """A class or function by its dotted name, and its library with the version."""
    module, _, of = name.rpartition(".")
    library = module.partition(".")[0]
    try:
        return getattr(importlib.import_module(module), of), f"{library} {importlib.metadata.version(library)}"
    except (ImportError, AttributeError, ValueError) as error:
        sys.exit(f"expected module.Class, module.Class:method or module.function, got {name!r} ({error})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m ckptfused.models", description=__doc__)
    parser.add_argument("names", nargs="+", metavar="module.Class", help="or module.Class:method, or module.function")
    main(parser.parse_args().names)

"""`python -m ckptfused.convert module.Class …`: writes down the forwards of these classes as they are installed.

`module.Class:method` writes down another method that an adapter stands in for (`Family.methods`), `module.function` a
function that a model holds.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys

from ckptfused.layer.source import KNOWN_FILE, fingerprint, known, note_functions


def main(names: list[str]) -> None:
    """Adds the fingerprint of each class's forward, or of the method that is named, to known.json, and those of the
    functions that it calls."""
    found = known()
    for named in names:
        name, _, method = named.partition(":")
        module, _, cls = name.rpartition(".")
        library = module.partition(".")[0]
        said = f"{library} {importlib.metadata.version(library)}"
        holder = getattr(importlib.import_module(module), cls)
        function = getattr(holder, method or "forward", holder)
        found["functions" if function is holder else "classes"].setdefault(name, {}).setdefault(
            fingerprint(function), said
        )
        note_functions(found, function, said)
    for kind in ("classes", "functions"):
        found[kind] = dict(sorted(found[kind].items()))
    KNOWN_FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

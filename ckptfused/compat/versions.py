"""ckptfused's version, and those of PyTorch that the names in this folder hold for.

The build and `--version` read this file, so it imports nothing.
"""

VERSION = "0.1.0"
OLDEST, NEWEST = (2, 11), (2, 13)


def unsupported(torch_version: str) -> str:
    """A sentence for people with a PyTorch older or newer than these; empty for the others."""
    major, minor = (int(number) for number in torch_version.split(".")[:2])
    if OLDEST <= (major, minor) <= NEWEST:
        return ""
    first, last = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
    return (
        f"ckptfused works with PyTorch {first} to {last}, and this is {torch_version}: install one of those, then "
        "build ckptfused against it"
    )

"""The versions of PyTorch that the names in this folder hold for. The build reads this file, so it imports nothing."""

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

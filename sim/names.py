"""What to say to a name that nobody knows."""

import difflib
from collections.abc import Iterable


def unknown(owner: str, name: object, known: Iterable[str]) -> str:
    """Say that an owner has no such option, with the nearest one that it has, or all of them."""
    names = list(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    remedy = f"did you mean {near[0]!r}?" if near else f"it knows {', '.join(names)}"
    return f"{owner} has no option {name!r}: {remedy}"

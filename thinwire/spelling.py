"""What somebody may have meant who wrote a name that there is not."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def meant(name: str, known: Iterable[str]) -> str:
    """The end of a message: "; did you mean topk?", or nothing if no name is like this one."""
    near = get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""

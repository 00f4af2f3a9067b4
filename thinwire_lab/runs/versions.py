"""Which code this is: what a result was made with."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import torch

import thinwire


@cache
def versions() -> dict[str, str]:
    """Of thinwire, with its commit if the package lies in a checkout of its own, and of torch."""
    commit = _commit(Path(thinwire.__file__).parents[1])
    known = {"thinwire": thinwire.__version__, "commit": commit, "torch": torch.__version__}
    return {name: text for name, text in known.items() if text}


def _commit(checkout: Path) -> str:
    """Ends with -dirty if files differ from it; "" where there is none, or no git."""
    if not (checkout / ".git").exists():  # else git would look further up, in the user's own
        return ""
    ask = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12",
           "--exclude=*"]  # fmt: skip
    try:
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""

"""Selectors say *where*: which entries of every row are kept, never their values.

A selector is a function `(rows, k, state) -> flat indices`. One decorated with `fused` is handed
the unevaluated `Sum` of residual and gradient instead of a tensor, so that a kernel can add and
select in one sweep.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

Pick = TypeVar("Pick", bound=Callable[..., Tensor])


def fused(pick: Pick) -> Pick:
    """Mark a selector that can read a `Sum`."""
    pick.fused = True  # type: ignore[attr-defined]
    return pick

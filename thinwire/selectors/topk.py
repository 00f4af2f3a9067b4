"""Exact top-k by magnitude: over `by_layer` TopkA, over `by_row` all-dimension top-k."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from thinwire import kernels
from thinwire.operand import Sum
from thinwire.selectors import fused


@fused
def topk(rows: Tensor | Sum, k: int, state: Any) -> Tensor:  # (r, c) -> (r * k,)
    """The k entries of largest magnitude in every row."""
    return rows.topk(k, state) if isinstance(rows, Sum) else kernels.topk(rows, k, state)

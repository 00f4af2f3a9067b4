"""The one place that decides which code does the inner loops.

`reference` (plain torch) defines every kernel and serves every device. Faster versions must
return the same selection: magnitude descending, ties by the lower index.
"""

from __future__ import annotations

from thinwire.kernels.reference import accumulate, finite, topk

__all__ = ["accumulate", "finite", "topk"]

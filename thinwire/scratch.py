"""Large buffers that are used again.

Fresh memory costs a page fault per 4 KB: more than writing it, and more than most arithmetic on it.
The C library gives large blocks back to the system as soon as they are free. So each thread keeps
those that it took from here, and takes one again once nobody holds a tensor in it.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

LARGE = 1 << 17  # bytes from which on it pays
IDLE = 1000  # requests after which a block that served none of them is given back


class _Pool(threading.local):
    """The blocks of one thread, and the number of the request that each served last."""

    def __init__(self) -> None:
        self.blocks: list[np.ndarray[Any, Any]] = []
        self.served: list[int] = []
        self.requests = 0

    def find(self, size: int) -> np.ndarray[Any, Any]:
        """A free block that is large enough, and not far too large; or a new one."""
        self.requests += 1
        for place in range(len(self.blocks)):
            if size <= self.blocks[place].size <= 2 * size and self._is_free(place):
                self.served[place] = self.requests
                return self.blocks[place]
        self._drop_idle()
        self.blocks.append(np.empty(size, np.uint8))
        self.served.append(self.requests)
        return self.blocks[-1]

    def _is_free(self, place: int) -> bool:
        return sys.getrefcount(self.blocks[place]) == 2  # the list's, and the one that asks

    def _drop_idle(self) -> None:
        old = self.requests - IDLE
        kept = [p for p in range(len(self.blocks)) if self.served[p] > old or not self._is_free(p)]
        self.blocks = [self.blocks[place] for place in kept]
        self.served = [self.served[place] for place in kept]


_pool = _Pool()


def empty(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """n numbers, not set: in memory that this thread has used before, where there is some.

    Args:
        n: How many.
        dtype: Their type.
        device: Where. Only processor memory is kept here: PyTorch keeps that of a GPU itself.

    Example:
        >>> empty(3, torch.float32, torch.device("cpu")).shape
        torch.Size([3])
    """
    size = n * dtype.itemsize
    if size < LARGE or device.type != "cpu":
        return torch.empty(n, dtype=dtype, device=device)
    return torch.from_numpy(_pool.find(size)[:size]).view(dtype)

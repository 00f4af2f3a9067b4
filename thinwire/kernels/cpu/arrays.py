"""Tensors as NumPy arrays, how Numba compiles the loops over them, and which threads run these.

A loop has a signature, written `"i8(f4[::1], b1)"`: it takes float32 and a flag, and returns int64.
So it is compiled when its file is imported, or loaded from Numba's cache. It runs without the GIL.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
import torch
from numba import njit
from torch import Tensor

T = TypeVar("T")
Array = np.ndarray[Any, Any]
PART = 262_144  # entries worth a thread
compiled = partial(njit, nogil=True, cache=True, error_model="numpy")


def as_array(x: Tensor) -> Array:
    """The tensor's numbers, flat, where they lie."""
    return x.detach().view(-1).numpy()


def as_tensor(x: Array) -> Tensor:
    """The array's numbers, where they lie."""
    return torch.from_numpy(x).as_strided((x.size,), (1,))  # of nothing NumPy strides as it likes


def run_parts(n: int, work: Callable[[int, int], T], unit: int = PART) -> list[T]:
    """work(start, stop) over stretches of n, as many as torch has threads and are worth one."""
    count = min(torch.get_num_threads(), max(1, n // unit))
    if count == 1:
        return [work(0, n)]
    edges = [n * i // count for i in range(count + 1)]
    return list(_pool().map(work, edges[:-1], edges[1:]))


def run_blocks(edges: Array, work: Callable[[slice, Array], T]) -> list[T]:
    """work(which blocks, their edges), where blocks begin and end at these edges."""
    count = edges.size - 1
    mean = max(1, int(edges[-1]) // max(1, count))

    def part(start: int, stop: int) -> T:
        return work(slice(start, stop), edges[start : stop + 1])

    return run_parts(count, part, unit=max(1, PART // mean))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="thinwire kernel")

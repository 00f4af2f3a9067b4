"""The threads of the CPU kernels: as many as torch has, for as much work as is worth one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")
Array = np.ndarray[Any, Any]
PART = 262_144  # entries worth a thread


def in_parts(n: int, work: Callable[[int, int], T], unit: int = PART) -> list[T]:
    """work(start, stop) over stretches of n, as many as torch has threads and are worth one."""
    count = min(torch.get_num_threads(), max(1, n // unit))
    if count == 1:
        return [work(0, n)]
    edges = [n * i // count for i in range(count + 1)]
    return list(_pool().map(work, edges[:-1], edges[1:]))


def in_blocks(n: int, block: int, work: Callable[[slice, slice], T]) -> list[T]:
    """work(which blocks, which of n entries); a part begins with a block."""

    def part(start: int, stop: int) -> T:
        return work(slice(start, stop), slice(start * block, min(n, stop * block)))

    return in_parts(-(-n // block), part, unit=max(1, PART // block))


def between(edges: Array, work: Callable[[slice, Array], T]) -> list[T]:
    """work(which blocks, their edges), where blocks begin and end at these edges."""
    count = edges.size - 1
    mean = max(1, int(edges[-1]) // max(1, count))

    def part(start: int, stop: int) -> T:
        return work(slice(start, stop), edges[start : stop + 1])

    return in_parts(count, part, unit=max(1, PART // mean))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="thinwire kernel")

"""The k-th largest of many keys, digit by digit: exact, and as fast with ties as without."""

from __future__ import annotations

import numpy as np
from numba import uint32, uint64

from thinwire.kernels.cpu.arrays import compiled

DIGIT = 11  # bits: their counts stay in the nearest cache


@compiled("void(u4[::1], u8, u8, i8[:, ::1])")
def _count_digits(keys, shift, prefix, counts):
    """How often every digit above `shift` occurs behind this prefix. Neighbours count apart,
    because ties would wait for one another."""
    for i in range(keys.size):
        key = uint64(keys[i])
        if key >> (shift + uint64(DIGIT)) == prefix:
            counts[i & 3, (key >> shift) & uint64((1 << DIGIT) - 1)] += 1


@compiled("u4(u4[::1], i8)")
def find_kth(keys, k):
    """The k-th largest, 1 <= k <= size."""
    prefix = uint64(0)
    for turn in range(3):  # of the 33 bits the first is none
        counts = np.zeros((4, 1 << DIGIT), np.int64)
        _count_digits(keys, uint64(DIGIT * (2 - turn)), prefix, counts)
        every = counts.sum(axis=0)
        digit = every.size - 1
        while every[digit] < k:
            k -= every[digit]
            digit -= 1
        prefix = (prefix << uint64(DIGIT)) | uint64(digit)
    return uint32(prefix)

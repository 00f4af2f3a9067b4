"""Which parameter lives where in a flat buffer.

A slot keeps the memory order of its parameter (a channels_last weight stays channels_last), as
DDP's own buckets do; a layout is the list of slots and the identity of a bucket.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from torch import Tensor


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a flat buffer, in the memory order of the parameter itself."""

    name: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def stop(self) -> int:
        """Where it ends: one past its last entry."""
        return self.offset + self.numel

    def view(self, flat: Tensor) -> Tensor:
        """This parameter inside `flat`, with its own shape (channels_last stays channels_last)."""
        return flat.as_strided(self.shape, self.strides, flat.storage_offset() + self.offset)

    @cached_property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of the contiguous matrix (outermost dimension in memory x the rest)."""
        if not self.shape or self.numel == 0:
            return (1, self.numel)
        rows = max(zip(self.strides, self.shape, strict=True))[1] if len(self.shape) > 1 else 1
        return (rows, self.numel // rows)


SMALL = 1000  # entries


def vectors(slot: Slot) -> bool:
    """The rule for biases and norms: anything with one entry per row. ADTopk keeps them dense.

    Args:
        slot: The parameter: its name and shape.

    Example:
        >>> vectors(Slot("bias", 0, (64,), (1,)))
        True
    """
    return len(slot.shape) <= 1 or slot.numel == slot.shape[0]


def small(slot: Slot) -> bool:
    """The rule for vectors, and whatever else is too small for its bytes to count.

    Args:
        slot: The parameter: its name and shape.

    Example:
        >>> small(Slot("embedding", 0, (10_000, 512), (512, 1)))
        False
    """
    return vectors(slot) or slot.numel <= SMALL


@dataclass(frozen=True)
class Layout:
    """Which parameters live where in a flat buffer of `numel` entries; gaps belong to others."""

    slots: tuple[Slot, ...]
    numel: int

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """The stretches of the flat buffer that are ours, neighbours joined."""
        runs: list[tuple[int, int]] = []
        for slot in self.slots:
            if slot.numel == 0:
                continue
            if runs and runs[-1][1] == slot.offset:
                runs[-1] = (runs[-1][0], slot.stop)
            else:
                runs.append((slot.offset, slot.stop))
        return tuple(runs)

    @cached_property
    def size(self) -> int:
        """How many entries are ours."""
        return sum(slot.numel for slot in self.slots)

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> Layout:
        """These tensors one after the other."""
        return Layout.packed([
            Slot(name, 0, tuple(tensor.shape), memory_strides(tensor))
            for name, tensor in tensors.items()
        ])  # fmt: skip

    @staticmethod
    def packed(slots: Iterable[Slot]) -> Layout:
        """The same slots side by side, wherever they were."""
        placed, offset = [], 0
        for slot in slots:
            placed.append(Slot(slot.name, offset, slot.shape, slot.strides))
            offset += slot.numel
        return Layout(tuple(placed), offset)


def memory_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides a tensor has in a flat buffer: its own if it fills its memory, else row-major."""
    if fills_memory(tensor):
        return tuple(tensor.stride())
    return tuple(prod(tensor.shape[d + 1 :]) for d in range(tensor.dim()))


def fills_memory(tensor: Tensor) -> bool:
    """Whether the tensor fills one stretch of memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def shared_seed(seed: int, step: int, name: str) -> int:
    """A seed that every rank derives alike from these three; the global generator is never used."""
    digest = hashlib.sha256(f"{seed}/{step}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def regions(n: int, world: int) -> list[tuple[int, int]]:
    """Where the stretch of each rank begins and ends: equal to one entry."""
    return [(n * r // world, n * (r + 1) // world) for r in range(world)]


def share_of(k: int, turn: int, world: int) -> int:
    """What one of `world` gets of k; who gets more when it does not divide goes by the turn."""
    return k * (turn % world + 1) // world - k * (turn % world) // world

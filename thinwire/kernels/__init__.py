"""The one place that decides which code does the inner loops.

Plain torch defines every kernel and serves every device and precision: `reference` (adding,
selecting, sparse sums), `rice`, `bits` and `scales` (codes). Faster ones return the same, for
single precision: Numba's on the CPU, Triton's on a GPU, loaded at the first attach or when first
needed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from thinwire.kernels.reference import Memo, Runs
from thinwire.kernels.scales import Edges

__all__ = [
    "above", "accumulate", "add_topk", "ascending", "bf16_encode", "bitmap_decode", "bitmap_encode",
    "block_decode", "block_encode", "compress", "either", "filled", "finite", "fp8_decode",
    "fp8_encode", "gather", "half_encode", "int8_encode", "levels_encode", "member", "merged",
    "natural_decode", "natural_encode", "onebit_encode", "pack", "rice_decode", "rice_encode",
    "rice_size", "scaled", "scatter_add", "sign_encode", "topk", "unpack", "warm",
]  # fmt: skip


@dataclass(frozen=True)
class Room:
    """The files that hold the same kernels: in plain torch, for the CPU and for the GPU."""

    torch: str
    cpu: str
    gpu: str

    def floats(self, *tensors: Tensor) -> ModuleType:
        """Who serves these: kernels are for single precision that lies in one piece."""
        kind = tensors[0].device.type
        for x in tensors:
            if x.device.type != kind or x.dtype != torch.float32 or not x.is_contiguous():
                return _loaded(self.torch)
        return self.of(tensors[0])

    def of(self, x: Tensor) -> ModuleType:
        """Who serves positions and codes, whose types are fixed."""
        if x.device.type == "cpu":
            return _loaded(self.cpu)
        return _loaded(self.gpu if x.device.type == "cuda" and _has_triton() else self.torch)


SELECT = Room("reference", "cpu", "gpu")
SPARSE = Room("reference", "sparse", "gpu")
RICE = Room("rice", "sparse", "rice_gpu")
BITS = Room("bits", "bits_cpu", "bits_gpu")
SCALES = Room("scales", "scales_cpu", "scales_gpu")


def warm() -> None:
    """Compile what there is to compile, or load it from disk, before the first step needs it."""
    for room in (SELECT, SPARSE, RICE, BITS, SCALES):
        _loaded(room.cpu)


def accumulate(residual: Tensor, grad: Tensor, alpha: float = 1.0) -> bool:
    """residual += alpha * grad where that is finite; whether it was everywhere."""
    done: bool = SELECT.floats(residual, grad).accumulate(residual, grad, alpha)
    return done


def add_topk(
    residual: Tensor, grad: Tensor, alpha: float, k: int, memo: Memo
) -> tuple[Tensor, bool]:
    """`accumulate`, and flat indices of the k largest magnitudes in every row of the result."""
    found: tuple[Tensor, bool] = SELECT.floats(residual, grad).add_topk(
        residual, grad, alpha, k, memo
    )
    return found


def topk(rows: Tensor, k: int, memo: Memo | None = None) -> Tensor:
    """Flat indices, ascending, of the k entries of largest magnitude in every row."""
    index: Tensor = SELECT.floats(rows).topk(rows, k, memo)
    return index


def above(x: Tensor, edge: float, most: int) -> tuple[Tensor, int]:
    """Where the magnitude is at least `edge`, and how often."""
    found: tuple[Tensor, int] = SELECT.floats(x).above(x, edge, most)
    return found


def gather(x: Tensor, indices: Tensor) -> Tensor:
    """The entries at these positions."""
    values: Tensor = SPARSE.floats(x).gather(x, indices)
    return values


def scatter_add(out: Tensor, indices: Tensor, values: Tensor, alpha: float = 1.0) -> Tensor:
    """out[indices] += alpha * values, in their order."""
    done: Tensor = SPARSE.floats(out, values).scatter_add(out, indices, values, alpha)
    return done


def filled(out: Tensor, runs: Runs, indices: Tensor, values: Tensor, alpha: float) -> float:
    """out = 0 in the runs, then out[indices] += alpha * values; best where indices ascend.

    Returns a magnitude that no entry written exceeds; infinite for NaN.
    """
    peak: float = SPARSE.floats(out, values).filled(out, runs, indices, values, alpha)
    return peak


def finite(x: Tensor) -> bool:
    """Whether no entry is NaN or infinite, in one read."""
    clean: bool = SELECT.floats(x).finite(x)
    return clean


def ascending(indices: Tensor, numel: int) -> bool:
    """Whether these positions ascend strictly, from 0 on, and stay below numel."""
    well: bool = SPARSE.of(indices).ascending(indices, numel)
    return well


def member(indices: Tensor, others: Tensor) -> Tensor:
    """Which of the indices are among the others; both ascend."""
    found: Tensor = SPARSE.of(indices).member(indices, others)
    return found


def compress(indices: Tensor, values: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of a payload whose flag is set."""
    few: tuple[Tensor, Tensor] = SPARSE.floats(values).compress(indices, values, kept)
    return few


def merged(indices: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of payloads with ascending indices, ascending."""
    total: tuple[Tensor, Tensor] = SPARSE.floats(*values).merged(indices, values)
    return total


def rice_size(indices: Tensor) -> int:
    """Bytes that `rice_encode` will make of these positions."""
    size: int = RICE.of(indices).rice_size(indices)
    return size


def rice_encode(indices: Tensor) -> Tensor:
    """Ascending positions in Golomb-Rice code."""
    data: Tensor = RICE.of(indices).rice_encode(indices)
    return data


def rice_decode(data: Tensor, k: int, numel: int) -> Tensor | None:
    """The k positions below numel that the bytes hold; None if they do not."""
    indices: Tensor | None = RICE.of(data).rice_decode(data, k, numel)
    return indices


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes of 1, 2, 4 or 8 bits side by side in bytes."""
    data: Tensor = BITS.of(codes).pack(codes, bits)
    return data


def unpack(data: Tensor, bits: int, n: int) -> Tensor:
    """The n codes that as many bytes hold."""
    codes: Tensor = BITS.of(data).unpack(data, bits, n)
    return codes


def int8_encode(x: Tensor, block: int, edges: Edges = None) -> tuple[Tensor, Tensor]:
    """A scale a block, and whole multiples of it."""
    both: tuple[Tensor, Tensor] = SCALES.floats(x).int8_encode(x, block, edges)
    return both


def sign_encode(x: Tensor, block: int, edges: Edges = None) -> tuple[Tensor, Tensor]:
    """The mean magnitude of every block, and the signs, packed."""
    both: tuple[Tensor, Tensor] = SCALES.floats(x).sign_encode(x, block, edges)
    return both


def scaled(codes: Tensor, scale: Tensor, block: int, edges: Edges = None) -> Tensor:
    """Codes times the scale of their block, in its precision."""
    values: Tensor = SCALES.floats(scale).scaled(codes, scale, block, edges)
    return values


def fp8_encode(x: Tensor, block: int, edges: Edges = None) -> tuple[Tensor, Tensor]:
    """A scale a block, and e4m3 multiples of it."""
    both: tuple[Tensor, Tensor] = SCALES.floats(x).fp8_encode(x, block, edges)
    return both


def fp8_decode(codes: Tensor, scale: Tensor, block: int, edges: Edges = None) -> Tensor:
    """The numbers, in the precision of the scale."""
    values: Tensor = SCALES.floats(scale).fp8_decode(codes, scale, block, edges)
    return values


def onebit_encode(x: Tensor, block: int, edges: Edges = None) -> tuple[Tensor, Tensor, Tensor]:
    """The means of every block's positive and negative numbers, and the signs, packed."""
    three: tuple[Tensor, Tensor, Tensor] = SCALES.floats(x).onebit_encode(x, block, edges)
    return three


def either(signs: Tensor, above: Tensor, below: Tensor, block: int, edges: Edges = None) -> Tensor:
    """The one number of its block where the code is 1, the other where it is 0."""
    values: Tensor = SCALES.floats(above, below).either(signs, above, below, block, edges)
    return values


def levels_encode(
    x: Tensor, block: int, levels: int, seed: int, edges: Edges = None,
    *, norm: str, clip: float | None, fitted: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A scale a block, and whole multiples of it at random, from 0 for -levels."""
    both: tuple[Tensor, Tensor] = SCALES.floats(x).levels_encode(
        x, block, levels, seed, edges, norm=norm, clip=clip, fitted=fitted
    )
    return both


def natural_encode(x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """The largest power of two, and signs and powers counted down from it."""
    both: tuple[Tensor, Tensor] = SCALES.floats(x).natural_encode(x, seed)
    return both


def natural_decode(codes: Tensor, top: int, dtype: torch.dtype) -> Tensor:
    """The powers of two."""
    values: Tensor = SCALES.of(codes).natural_decode(codes, top, dtype)
    return values


def half_encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """A power of two, and the numbers times it in half precision."""
    both: tuple[Tensor, Tensor] = SCALES.floats(x).half_encode(x)
    return both


def bf16_encode(x: Tensor) -> Tensor:
    """The nearest that is finite where the number is."""
    codes: Tensor = SCALES.floats(x).bf16_encode(x)
    return codes


def bitmap_encode(indices: Tensor, numel: int) -> Tensor:
    """A bit for every entry, set at these."""
    data: Tensor = BITS.of(indices).bitmap_encode(indices, numel)
    return data


def bitmap_decode(data: Tensor, k: int, numel: int) -> Tensor | None:
    """The k entries that are set; None if these are more or fewer."""
    indices: Tensor | None = BITS.of(data).bitmap_decode(data, k, numel)
    return indices


def block_encode(indices: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """How many positions every 65,536 entries have, and their low 16 bits."""
    both: tuple[Tensor, Tensor] = BITS.of(indices).block_encode(indices, numel)
    return both


def block_decode(counts: Tensor, low: Tensor) -> Tensor | None:
    """The positions; None if the counts are not those of so many."""
    indices: Tensor | None = BITS.of(counts).block_decode(counts, low)
    return indices


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _loaded(name: str) -> ModuleType:
    return importlib.import_module(f"thinwire.kernels.{name}")

"""The one place that decides which code does the inner loops.

`reference` (plain torch) defines every kernel and serves every device and precision. Faster ones
return the same, for single precision: `cpu` (Numba) and `gpu` (Triton), loaded at the first attach
or when first needed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from thinwire.kernels import reference
from thinwire.kernels.reference import Memo, Runs

__all__ = [
    "above", "accumulate", "add_topk", "ascending", "bitmap_decode", "bitmap_encode",
    "block_decode", "block_encode", "compress", "filled", "finite", "gather", "int8_encode",
    "member", "merged", "pack", "rice_decode", "rice_encode", "rice_size", "scaled", "scatter_add",
    "sign_encode", "topk", "unpack", "warm",
]  # fmt: skip


def warm() -> None:
    """Compile what there is to compile, or load it from disk, before the first step needs it."""
    _loaded("cpu")


def accumulate(residual: Tensor, grad: Tensor, alpha: float = 1.0) -> bool:
    """residual += alpha * grad where that is finite; whether it was everywhere."""
    done: bool = _floats(residual, grad).accumulate(residual, grad, alpha)
    return done


def add_topk(
    residual: Tensor, grad: Tensor, alpha: float, k: int, memo: Memo
) -> tuple[Tensor, bool]:
    """`accumulate`, and flat indices of the k largest magnitudes in every row of the result."""
    found: tuple[Tensor, bool] = _floats(residual, grad).add_topk(residual, grad, alpha, k, memo)
    return found


def topk(rows: Tensor, k: int, memo: Memo | None = None) -> Tensor:
    """Flat indices, ascending, of the k entries of largest magnitude in every row."""
    index: Tensor = _floats(rows).topk(rows, k, memo)
    return index


def above(x: Tensor, edge: float, most: int) -> tuple[Tensor, int]:
    """Where the magnitude is at least `edge`, and how often."""
    found: tuple[Tensor, int] = _floats(x).above(x, edge, most)
    return found


def gather(x: Tensor, indices: Tensor) -> Tensor:
    """The entries at these positions."""
    values: Tensor = _floats(x).gather(x, indices)
    return values


def scatter_add(out: Tensor, indices: Tensor, values: Tensor, alpha: float = 1.0) -> Tensor:
    """out[indices] += alpha * values, in their order."""
    done: Tensor = _floats(out, values).scatter_add(out, indices, values, alpha)
    return done


def filled(out: Tensor, runs: Runs, indices: Tensor, values: Tensor, alpha: float) -> float:
    """out = 0 in the runs, then out[indices] += alpha * values; best where indices ascend.

    Returns a magnitude that no entry written exceeds; infinite for NaN.
    """
    peak: float = _floats(out, values).filled(out, runs, indices, values, alpha)
    return peak


def finite(x: Tensor) -> bool:
    """Whether no entry is NaN or infinite, in one read."""
    clean: bool = _floats(x).finite(x)
    return clean


def ascending(indices: Tensor, numel: int) -> bool:
    """Whether these positions ascend strictly, from 0 on, and stay below numel."""
    well: bool = _bits(indices).ascending(indices, numel)
    return well


def member(indices: Tensor, others: Tensor) -> Tensor:
    """Which of the indices are among the others; both ascend."""
    found: Tensor = _bits(indices).member(indices, others)
    return found


def compress(indices: Tensor, values: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of a payload whose flag is set."""
    few: tuple[Tensor, Tensor] = _floats(values).compress(indices, values, kept)
    return few


def merged(indices: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of payloads with ascending indices, ascending."""
    total: tuple[Tensor, Tensor] = _floats(*values).merged(indices, values)
    return total


def rice_size(indices: Tensor) -> int:
    """Bytes that `rice_encode` will make of these positions."""
    size: int = _bits(indices).rice_size(indices)
    return size


def rice_encode(indices: Tensor) -> Tensor:
    """Ascending positions in Golomb-Rice code."""
    data: Tensor = _bits(indices).rice_encode(indices)
    return data


def rice_decode(data: Tensor, k: int, numel: int) -> Tensor | None:
    """The k positions below numel that the bytes hold; None if they do not."""
    indices: Tensor | None = _bits(data).rice_decode(data, k, numel)
    return indices


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes of 1, 2, 4 or 8 bits side by side in bytes."""
    data: Tensor = _bits(codes).pack(codes, bits)
    return data


def unpack(data: Tensor, bits: int, n: int) -> Tensor:
    """The n codes that as many bytes hold."""
    codes: Tensor = _bits(data).unpack(data, bits, n)
    return codes


def int8_encode(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """A scale a block, and whole multiples of it."""
    both: tuple[Tensor, Tensor] = _floats(x).int8_encode(x, block)
    return both


def sign_encode(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The mean magnitude of every block, and the signs, packed."""
    both: tuple[Tensor, Tensor] = _floats(x).sign_encode(x, block)
    return both


def scaled(codes: Tensor, scale: Tensor, block: int) -> Tensor:
    """Codes times the scale of their block, in its precision."""
    values: Tensor = _floats(scale).scaled(codes, scale, block)
    return values


def bitmap_encode(indices: Tensor, numel: int) -> Tensor:
    """A bit for every entry, set at these."""
    data: Tensor = _bits(indices).bitmap_encode(indices, numel)
    return data


def bitmap_decode(data: Tensor, k: int, numel: int) -> Tensor | None:
    """The k entries that are set; None if these are more or fewer."""
    indices: Tensor | None = _bits(data).bitmap_decode(data, k, numel)
    return indices


def block_encode(indices: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """How many positions every 65,536 entries have, and their low 16 bits."""
    both: tuple[Tensor, Tensor] = _bits(indices).block_encode(indices, numel)
    return both


def block_decode(counts: Tensor, low: Tensor) -> Tensor | None:
    """The positions; None if the counts are not those of so many."""
    indices: Tensor | None = _bits(counts).block_decode(counts, low)
    return indices


def _floats(*tensors: Tensor) -> ModuleType:
    """Who serves these: kernels are for single precision that lies in one piece."""
    kind = tensors[0].device.type
    for x in tensors:
        if x.device.type != kind or x.dtype != torch.float32 or not x.is_contiguous():
            return reference
    return _bits(tensors[0])


def _bits(x: Tensor) -> ModuleType:
    """Who serves positions and codes, whose types are fixed."""
    if x.device.type == "cpu":
        return _loaded("cpu")
    return _loaded("gpu") if x.device.type == "cuda" and _has_triton() else reference


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _loaded(name: str) -> ModuleType:
    return importlib.import_module(f"thinwire.kernels.{name}")

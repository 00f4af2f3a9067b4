"""The inner loops, and the one place that decides which code runs them.

An operation has the same name, in a file of the same name, in up to three forms:

    reference/   plain torch: what it computes, on any device and in any precision
    cpu/         Numba, for single precision
    gpu/         Triton, for single precision on CUDA

All forms return the same bits. Numba and Triton load at the first attach, or at the first call.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from thinwire.kernels.reference import bits, matrix, rice, scales, select, sparse

P = ParamSpec("P")
R = TypeVar("R")
ROOMS = {"cpu": "cpu", "cuda": "gpu"}  # kind of device: where its kernels lie


def warm() -> None:
    """Compile what there is to compile, or load it from disk, before the first step needs it."""
    for name in ("bits", "matrix", "rice", "scales", "select", "sparse"):
        importlib.import_module(f"thinwire.kernels.cpu.{name}")


def _dispatch(
    spec: Callable[P, R], *places: int, dtype: torch.dtype = torch.float32
) -> Callable[P, R]:
    """The spec, or its fast form where the arguments at these places have this type, in one piece.

    Without places the first argument decides.
    """
    first, *others = places or (0,)
    forms: dict[torch.device, Callable[P, R]] = {}  # as they are first needed

    @wraps(spec)
    def call(*args: P.args, **options: P.kwargs) -> R:
        x: Any = args[first]
        device = x.device
        if x.dtype is not dtype or not x.is_contiguous():
            return spec(*args, **options)
        for place in others:
            y: Any = args[place]
            if y.dtype is not dtype or not y.is_contiguous() or y.device != device:
                return spec(*args, **options)
        form = forms.get(device)
        if form is None:
            form = forms[device] = _find(spec, device.type)  # a slow attribute: once
        return form(*args, **options)

    return call


def _find(spec: Callable[P, R], kind: str) -> Callable[P, R]:
    """The form of the same name for this kind of device; the spec itself if there is none."""
    if kind not in ROOMS or (kind == "cuda" and importlib.util.find_spec("triton") is None):
        return spec
    home = spec.__module__.replace("reference", ROOMS[kind])
    if importlib.util.find_spec(home) is None:
        return spec
    module = importlib.import_module(home)
    form: Callable[P, R] = getattr(module, spec.__name__, spec)
    return form


@wraps(sparse.merged)
def merged(
    indices: Sequence[Tensor], values: Sequence[Tensor], /
) -> tuple[Tensor, Tensor]:  # as above, with lists of arguments
    device = values[0].device
    for x in values:
        if x.dtype is not torch.float32 or not x.is_contiguous() or x.device != device:
            return sparse.merged(indices, values)
    return _find(sparse.merged, device.type)(indices, values)


accumulate = _dispatch(select.accumulate, 0, 1)
add_topk = _dispatch(select.add_topk, 0, 1)
topk = _dispatch(select.topk)
above = _dispatch(select.above)
finite = _dispatch(select.finite)

project = _dispatch(matrix.project)
project_back = _dispatch(matrix.project_back)
add_outer = _dispatch(matrix.add_outer)

gather = _dispatch(sparse.gather)
scatter_add = _dispatch(sparse.scatter_add, 0, 2)
filled = _dispatch(sparse.filled, 0, 3)
compress = _dispatch(sparse.compress, 1)
ascending = _dispatch(sparse.ascending, dtype=torch.int64)
member = _dispatch(sparse.member, dtype=torch.int64)

rice_size = _dispatch(rice.rice_size, dtype=torch.int64)
rice_encode = _dispatch(rice.rice_encode, dtype=torch.int64)
rice_decode = _dispatch(rice.rice_decode, dtype=torch.uint8)

pack = _dispatch(bits.pack, dtype=torch.uint8)
unpack = _dispatch(bits.unpack, dtype=torch.uint8)
bitmap_encode = _dispatch(bits.bitmap_encode, dtype=torch.int64)
bitmap_decode = _dispatch(bits.bitmap_decode, dtype=torch.uint8)
block_encode = _dispatch(bits.block_encode, dtype=torch.int64)
block_decode = _dispatch(bits.block_decode, dtype=torch.int32)

half_encode = _dispatch(scales.half_encode)
half_decode = _dispatch(scales.half_decode, dtype=torch.float16)
bf16_encode = _dispatch(scales.bf16_encode)
bf16_decode = _dispatch(scales.bf16_decode, dtype=torch.bfloat16)
int8_encode = _dispatch(scales.int8_encode)
fp8_encode = _dispatch(scales.fp8_encode)
fp8_decode = _dispatch(scales.fp8_decode, 1)
scaled = _dispatch(scales.scaled, 1)
sign_encode = _dispatch(scales.sign_encode)
onebit_encode = _dispatch(scales.onebit_encode)
either = _dispatch(scales.either, 1, 2)
levels_encode = _dispatch(scales.levels_encode)
natural_encode = _dispatch(scales.natural_encode)
natural_decode = _dispatch(scales.natural_decode, dtype=torch.uint8)

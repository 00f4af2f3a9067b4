"""The wire: how values and indices become bytes, and how many, known before the work is done.

A wire is named by its value code, and its index code after a plus: "bf16", "fp32+rice",
"bf16+auto". Without one indices take what the recipe prefers, mostly four bytes.

A message is a sparse payload as bytes, its indices relative to a span of the bucket:

    fixed index codes:    values | indices                       the length tells how many pairs
    others:               pairs (4 bytes) | values | indices
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from thinwire.payload import Sparse
from thinwire.protocols import WireError
from thinwire.wire.blocks import Fp8, Int8, Natural, Signs
from thinwire.wire.indices import Bitmap, Blocks, IndexCodec, Int32
from thinwire.wire.rice import Rice, Smallest
from thinwire.wire.values import Bf16, Exact, Half, ValueCodec, as_numbers

Span = tuple[int, int]  # the stretch of the bucket that a message speaks of
HEADER = 4  # bytes that say how many pairs there are, where the size does not tell


@dataclass(frozen=True, kw_only=True)
class Wire:
    """A value code and an index code."""

    values: ValueCodec = field(default_factory=Exact)
    indices: IndexCodec = field(default_factory=Int32)

    @cached_property
    def fixed(self) -> bool:
        """Whether bytes follow from pairs and the length of the bucket, and pairs from bytes.

        A bitmap costs the same for any number of pairs: values of less than a byte do not tell.
        """
        sizes = [self.values.nbytes(k) + self.indices.nbytes(k, 1000) for k in range(1, 18)]
        return self.indices.fixed and all(a < b for a, b in pairwise(sizes))

    def nbytes(self, k: int, numel: int, itemsize: int = 4) -> int:
        """Bytes of k (index, value) pairs; if not `fixed`, of k at random places."""
        head = 0 if self.fixed else HEADER
        return head + self.values.nbytes(k, itemsize) + self.indices.nbytes(k, numel)

    def size(self, mine: Sparse, span: Span) -> int:
        """Bytes of this payload's message, before the work."""
        head = 0 if self.fixed else HEADER
        values = self.values.nbytes(mine.entries, mine.values.element_size())
        return head + values + self.indices.size(_from(mine.indices, span), span[1] - span[0])

    def write(self, mine: Sparse, values: Tensor, span: Span) -> Tensor:
        """The message of a payload whose values are encoded already."""
        indices = self.indices.encode(_from(mine.indices, span), span[1] - span[0])
        if self.fixed:
            return torch.cat([values, indices])
        return torch.cat([write_count(mine.entries, values), values, indices])

    def read(self, message: Tensor, span: Span, like: Sparse) -> Sparse:
        """The payload of a message, or `WireError`."""
        itemsize, length = like.values.element_size(), span[1] - span[0]
        if self.fixed:
            k = _pairs(self, message.numel(), length, itemsize)
        else:
            k, message = read_count(message, length), message[HEADER:]
        cut = self.values.nbytes(k, itemsize)
        values = self.values.decode(message[:cut], k, like.values.dtype)
        indices = self.indices.decode(message[cut:], k, length)
        return Sparse(indices + span[0] if span[0] else indices, values, like.numel)


def write_count(n: int, like: Tensor) -> Tensor:
    """The number that a message begins with."""
    return torch.tensor([n], dtype=torch.int32, device=like.device).view(torch.uint8)


def read_count(message: Tensor, most: int) -> int:
    """The number that a message begins with, or `WireError`."""
    if message.numel() < HEADER:
        raise WireError(f"a message of {message.numel()} bytes does not say how long it is")
    count = int(as_numbers(message[:HEADER], torch.int32, 1))
    if not 0 <= count <= most:
        raise WireError(f"a message announces {count} of at most {most}")
    return count


@lru_cache(maxsize=4096)
def _pairs(wire: Wire, size: int, length: int, itemsize: int) -> int:
    """How many pairs a message of this size holds: every pair makes it longer."""
    return bisect_left(range(size + 1), size, key=lambda k: wire.nbytes(k, length, itemsize))


def _from(indices: Tensor, span: Span) -> Tensor:
    return indices - span[0] if span[0] else indices


_VALUES: dict[str, ValueCodec] = {
    "fp32": Exact(),
    "fp16": Half(),
    "bf16": Bf16(),
    "fp8": Fp8(),
    "int8": Int8(),
    "natural": Natural(),
    "sign": Signs(),
}
_INDICES: dict[str, IndexCodec] = {
    "int32": Int32(),
    "u16": Blocks(),
    "rice": Rice(),
    "bitmap": Bitmap(),
    "auto": Smallest(),
}


def wire(name: str | Wire, indices: str = "int32") -> Wire:
    """The wire of that name, or the wire itself; `indices` is the code of a name without one."""
    if isinstance(name, Wire):
        return name
    values, plus, code = name.partition("+") if isinstance(name, str) else ("", "", "")
    code = code if plus else indices
    if values not in _VALUES or code not in _INDICES:
        raise ValueError(
            f"wire must be one of {', '.join(_VALUES)}, and may name an index code "
            f"({', '.join('+' + known for known in _INDICES)}), got {name!r}; e.g. 'bf16+auto'"
        )
    return Wire(values=_VALUES[values], indices=_INDICES[code])

"""The wire: how values and indices become bytes, and how many, known before the work is done.

A wire is named by its value code, and its index code after a plus: "bf16", "fp32+rice",
"bf16+auto". Without one indices take what the recipe prefers, mostly four bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from thinwire.wire.blocks import Fp8, Int8, Natural, Signs
from thinwire.wire.indices import Bitmap, Blocks, IndexCodec, Int32
from thinwire.wire.rice import Rice, Smallest
from thinwire.wire.values import Bf16, Exact, Half, ValueCodec

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

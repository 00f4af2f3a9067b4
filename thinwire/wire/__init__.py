"""The wire: how values and indices become bytes, and how many, known before the work is done."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.wire.blocks import Fp8, Int8, Natural, Signs
from thinwire.wire.indices import Int32
from thinwire.wire.values import Bf16, Exact, Half, ValueCodec


@dataclass(frozen=True, kw_only=True)
class Wire:
    """A value code and an index code."""

    values: ValueCodec = field(default_factory=Exact)
    indices: Int32 = field(default_factory=Int32)

    def nbytes(self, k: int, itemsize: int = 4) -> int:
        """Bytes of k (index, value) pairs."""
        return self.values.nbytes(k, itemsize) + self.indices.nbytes(k)


_NAMED: dict[str, ValueCodec] = {
    "fp32": Exact(),
    "fp16": Half(),
    "bf16": Bf16(),
    "fp8": Fp8(),
    "int8": Int8(),
    "natural": Natural(),
    "sign": Signs(),
}


def wire(name: str | Wire) -> Wire:
    """The wire of that name, or the wire itself."""
    if isinstance(name, Wire):
        return name
    if not isinstance(name, str) or name not in _NAMED:
        raise ValueError(f"wire must be one of {', '.join(_NAMED)}, got {name!r}")
    return Wire(values=_NAMED[name])

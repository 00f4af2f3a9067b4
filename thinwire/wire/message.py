"""One sparse payload as bytes, and back: values first, then indices relative to a span.

fixed index codes:    values | indices                       the length tells how many pairs
others:               pairs (4 bytes) | values | indices
a slot:               length (4 bytes) | either of them | zeros up to the slot's room
"""

from __future__ import annotations

from bisect import bisect_left

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire import kernels
from thinwire.payload import Sparse, only
from thinwire.protocols import WireError
from thinwire.wire import HEADER, Wire
from thinwire.wire.values import as_numbers

Span = tuple[int, int]  # the stretch of the bucket that a message speaks of


def size(wire: Wire, mine: Sparse, span: Span) -> int:
    """Bytes of this payload, before the work."""
    head = 0 if wire.fixed else HEADER
    values = wire.values.nbytes(mine.entries, mine.values.element_size())
    return head + values + wire.indices.size(_shifted(mine.indices, -span[0]), span[1] - span[0])


def write(wire: Wire, mine: Sparse, values: Tensor, span: Span) -> Tensor:
    """The message of a payload whose values are encoded already."""
    indices = wire.indices.encode(_shifted(mine.indices, -span[0]), span[1] - span[0])
    if wire.fixed:
        return torch.cat([values, indices])
    return torch.cat([_number(mine.entries, values), values, indices])


def read(wire: Wire, message: Tensor, span: Span, like: Sparse) -> Sparse:
    """The payload of a message, or `WireError`."""
    itemsize, length = like.values.element_size(), span[1] - span[0]
    if wire.fixed:
        k = _pairs(wire, message.numel(), length, itemsize)
    else:
        k, message = _count(message, length), message[HEADER:]
    cut = wire.values.nbytes(k, itemsize)
    values = wire.values.decode(message[:cut], k, like.values.dtype)
    indices = wire.indices.decode(message[cut:], k, length)
    return Sparse(_shifted(indices, span[0]), values, like.numel)


def slot(message: Tensor, room: int) -> Tensor:
    """A message in a slot of so many bytes, which says itself how many of them count."""
    assert message.numel() + HEADER <= room, "fit a payload before it is put in a slot"
    filled = torch.cat([_number(message.numel(), message), message])
    return pad(filled, (0, room - filled.numel()))


def unslot(data: Tensor) -> Tensor:
    """The message in a slot."""
    length = _count(data, data.numel() - HEADER)
    return data[HEADER : HEADER + length]


def fit(wire: Wire, mine: Sparse, span: Span, room: int) -> Sparse:
    """As much of a payload as a slot holds: of more, the entries of largest magnitude."""
    length, itemsize = span[1] - span[0], mine.values.element_size()

    found, count = mine, mine.entries
    for _ in range(3):  # what random positions would take, closing in from above
        expected = max(1, wire.nbytes(count, length, itemsize))
        count = min(count, count * max(0, room - HEADER) // expected)
    if mine.entries > 2 * count:  # far too many: sort out most of them before they are coded
        count = min(mine.entries, count * 9 // 8 + 8)
        found = _largest(mine, count)
    else:
        count = mine.entries
    while count:
        taken = size(wire, found, span) + HEADER
        if taken <= room:
            return found
        # fewer entries take more bits each, so this is at most a little too many: no overshoot
        count = min(count - 1, count * room // taken)
        found = _largest(found, count)
    return found


def _largest(mine: Sparse, count: int) -> Sparse:
    """NaN counts as largest."""
    kept = torch.zeros(mine.entries, dtype=torch.bool, device=mine.values.device)
    if count:
        kept[kernels.topk(mine.values[None], count)] = True
    return only(mine, kept)


def _shifted(indices: Tensor, by: int) -> Tensor:
    return indices + by if by else indices


def _number(n: int, like: Tensor) -> Tensor:
    return torch.tensor([n], dtype=torch.int32, device=like.device).view(torch.uint8)


def _count(message: Tensor, most: int) -> int:
    """The number a message begins with."""
    if message.numel() < HEADER:
        raise WireError(f"a message of {message.numel()} bytes does not say how long it is")
    count = int(as_numbers(message[:HEADER], torch.int32, 1))
    if not 0 <= count <= most:
        raise WireError(f"a message announces {count} of at most {most}")
    return count


def _pairs(wire: Wire, size: int, length: int, itemsize: int) -> int:
    """How many pairs a message of this size holds: every pair makes it longer."""
    return bisect_left(range(size + 1), size, key=lambda k: wire.nbytes(k, length, itemsize))

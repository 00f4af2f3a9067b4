"""Messages of a fixed size: as much of a payload as a slot of so many bytes holds.

length (4 bytes) | the message | zeros up to the slot's room
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.payload import Sparse, largest
from thinwire.wire import HEADER, Span, Wire, read_count, write_count


def slot(message: Tensor, room: int) -> Tensor:
    """A message in a slot of so many bytes, which says itself how many of them count."""
    assert message.numel() + HEADER <= room, "fit a payload before it is put in a slot"
    filled = torch.cat([write_count(message.numel(), message), message])
    return pad(filled, (0, room - filled.numel()))


def unslot(data: Tensor) -> Tensor:
    """The message in a slot."""
    length = read_count(data, data.numel() - HEADER)
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
        found = largest(mine, count)
    else:
        count = mine.entries
    while count:
        taken = wire.size(found, span) + HEADER
        if taken <= room:
            return found
        # fewer entries take more bits each, so this is at most a little too many: no overshoot
        count = min(count - 1, count * room // taken)
        found = largest(found, count)
    return Sparse(mine.indices[:0], mine.values[:0], mine.numel)

"""Adding and selecting: one sweep over memory, exact all the same.

Flat: the sweep adds the gradient into the residual and writes down what reaches a guessed edge;
the k largest are then chosen among those few. The guess comes from the last step or from a sample.
A wrong one costs a count of magnitudes and a second sweep, never a wrong answer.

Row by row there is no guess: while adding, the largest magnitude of each of some groups is kept;
the k-th largest of these is reached by at least k entries of the row, and the row is still in cache
when they are collected.
"""

from __future__ import annotations

import math
import threading

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu import select_loops as loops
from thinwire.kernels.cpu.arrays import PART, Array, as_array, as_tensor, run_parts
from thinwire.kernels.cpu.kth import find_kth
from thinwire.kernels.cpu.lanes import INFINITE, LANES
from thinwire.kernels.reference.select import Memo

AIM = 1.2  # candidates the next guess should let through, in units of k
ROW = 65_536  # entries up to which a row is swept twice, in cache, rather than guessed at
MANY = 1 << 18  # keys from which on counting them is faster than partitioning
SAMPLE = 32_768  # entries from which the first edge is guessed
MOST_FOUND = 6  # candidates that are written down, in units of k
_own = threading.local()
NEVER = np.uint32(INFINITE + 1)  # an edge that nothing reaches


def topk(rows: Tensor, k: int, memo: Memo | None = None) -> Tensor:  # (r, c) -> (r * k,)
    return _select(rows, rows.new_empty(0), 1.0, k, {} if memo is None else memo)[0]


def add_topk(
    residual: Tensor, grad: Tensor, alpha: float, k: int, memo: Memo
) -> tuple[Tensor, bool]:  # (r, c), (r, c) -> (r * k,)
    return _select(residual, grad.view(-1), alpha, k, memo)


def accumulate(residual: Tensor, grad: Tensor, alpha: float = 1.0, decay: float = 1.0) -> bool:
    if decay == 1.0:
        return _sweep(as_array(residual), as_array(grad), np.float32(alpha), NEVER, 0)[3]
    x, steps = as_array(residual), as_array(grad)
    bits, weights = _to_bits(x), (np.float32(alpha), np.float32(decay))

    def part(start: int, stop: int) -> bool:
        here = slice(start, stop)
        return bool(loops.fade_and_add(x[here], bits[here], steps[here], *weights))

    return all(run_parts(x.size, part))


def above(x: Tensor, edge: float, most: int) -> tuple[Tensor, int]:  # (n,) -> (count,)
    values = as_array(x)
    found, _, count, _ = _sweep(values, values[:0], np.float32(1), _to_key(edge), most)
    return as_tensor(found[:most].copy()), count


def finite(x: Tensor) -> bool:
    values = as_array(x)
    return _sweep(values, values[:0], np.float32(1), np.uint32(INFINITE), 0)[2] == 0


def _select(rows: Tensor, grad: Tensor, alpha: float, k: int, memo: Memo) -> tuple[Tensor, bool]:
    r, c = rows.shape
    if k >= c:
        return torch.arange(r * c), grad.numel() == 0 or accumulate(rows.view(-1), grad, alpha)
    x, steps, weight = as_array(rows), as_array(grad), np.float32(alpha)
    if r == 1 and c > ROW:
        index, finite = _select_flat(x, steps, weight, k, memo)
    else:
        index, finite = _select_by_row(x, steps, weight, c, k)
    return as_tensor(index), finite


def _select_flat(
    x: Array, grad: Array, alpha: np.float32, k: int, memo: Memo
) -> tuple[Array, bool]:
    guess = memo.get("guess")
    edge = _sample_edge(x, grad, alpha, k) if guess is None else _to_key(guess)
    most = MOST_FOUND * k + 4096
    found, keys, count, finite = _sweep(x, grad, alpha, edge, most)
    if not k <= count <= most:
        edge, most = _count_edge(x, k)
        found, keys, count, _ = _sweep(x, x[:0], alpha, edge, most)
    kth = _find_kth(keys, k)
    memo["guess"] = _guess_next(_to_value(edge), _to_value(kth), memo.get("edge"), count / k)
    memo["edge"] = _to_value(kth)
    out = np.empty(k, np.int64)
    loops.cut(found, keys, kth, k, out)
    return out, finite


def _sweep(
    x: Array, grad: Array, alpha: np.float32, edge: np.uint32, most: int
) -> tuple[Array, Array, int, bool]:
    """Add, and what reaches the edge, with magnitudes; of more than `most` only their number."""

    def part(start: int, stop: int) -> tuple[Array, Array, int, bool]:
        room = min(most, stop - start) + LANES
        found, keys = _borrow(room)
        here, steps = x[start:stop], grad[start:stop]
        count, finite = loops.sweep(here, _to_bits(here), steps, alpha, edge, found, keys)
        found, keys = found[:count], keys[:count]
        if stop - start < x.size:  # the next part may be this thread's too
            return found + start, keys.copy(), count, finite
        return found, keys, count, finite

    parts = run_parts(x.size, part)
    if len(parts) == 1:
        return parts[0]  # in scratch: of use until the next sweep
    found, keys = (np.concatenate([one[i] for one in parts]) for i in (0, 1))
    return found, keys, sum(one[2] for one in parts), all(one[3] for one in parts)


def _sample_edge(x: Array, grad: Array, alpha: np.float32, k: int) -> np.uint32:
    """An edge that a few more than k entries will reach, judged by some of them."""
    stride = max(1, x.size // SAMPLE) | 1  # odd: not in step with rows of even length
    sample = x[::stride].copy()
    if grad.size:
        with np.errstate(all="ignore"):  # what is not finite is dealt with in the sweep
            sample += alpha * grad[::stride]
    keys = _to_bits(np.nan_to_num(np.abs(sample)))
    hits = k / x.size * keys.size
    wanted = min(keys.size, math.ceil(AIM * hits + 3 * math.sqrt(hits)))
    edge: np.uint32 = np.partition(keys, keys.size - wanted)[keys.size - wanted]
    return edge


def _count_edge(x: Array, k: int) -> tuple[np.uint32, int]:
    """An edge that at least k entries reach, and how many do: by counting all magnitudes."""
    counts = np.zeros(1 << (32 - loops.LOW), np.int64)
    loops.tally(_to_bits(x), counts)
    reached = counts[::-1].cumsum()
    place = int(np.searchsorted(reached, k))
    return np.uint32((counts.size - 1 - place) << loops.LOW), int(reached[place])


def _find_kth(keys: Array, k: int) -> np.uint32:
    """The k-th largest of them: of many by counting, which also does not mind ties."""
    if keys.size > MANY:
        return np.uint32(find_kth(keys, k))
    kth: np.uint32 = np.partition(keys, keys.size - k)[keys.size - k]
    return kth


def _guess_next(guess: float, kth: float, last: float | None, share: float) -> float:
    """A guess for the next step, which should let AIM times k through.

    Counts fall like a power of the edge near it, and two points of that line are known. A residual
    that still grows takes the edge with it: the last growth comes again, or most of it.
    """
    grown = kth + 0.7 * min(max(0.0, kth - last), kth) if last else kth
    if not 0 < guess < kth < math.inf or share <= 1.0:
        return 0.95 * grown
    steepness = math.log(share) / math.log(kth / guess)
    return grown * max(0.5, float(AIM ** (-1 / steepness)))


def _select_by_row(x: Array, grad: Array, alpha: np.float32, c: int, k: int) -> tuple[Array, bool]:
    r = x.size // c
    out = np.empty(r * k + 1, np.int64)  # one to spare: `_rank` writes before it knows
    groups = max(LANES, min(-(-2 * k // LANES), c // 2 // LANES) * LANES)
    each = max(1, PART // c)

    def part(start: int, stop: int) -> bool:
        here, there = start * each * c, min(stop * each, r) * c
        ours = out[start * each * k : there // c * k + 1]
        tops, masks = np.empty(groups, np.uint32), np.empty(c // 64 + 1, np.uint64)
        found, keys = np.empty(c + LANES, np.int64), np.empty(c + LANES, np.uint32)
        values = x[here:there]
        steps, bits = grad[here:there], _to_bits(values)
        ok = loops.select_rows(values, bits, steps, alpha, c, k, tops, masks, found, keys, ours)
        index = ours[: (there - here) // c * k]
        index += here
        return bool(ok)

    return out[: r * k], all(run_parts(-(-r // each), part, unit=1))


def _borrow(room: int) -> tuple[Array, Array]:
    """This thread's buffers for what is found: fresh memory every step would cost page faults."""
    held: tuple[Array, Array] | None = getattr(_own, "found", None)
    if held is None or held[0].size < room:
        held = _own.found = np.empty(room, np.int64), np.empty(room, np.uint32)
    return held[0][:room], held[1][:room]


def _to_bits(x: Array) -> Array:
    return x.view(np.uint32)


def _to_key(edge: float) -> np.uint32:
    with np.errstate(over="ignore"):  # beyond single precision: nothing reaches it
        key: np.uint32 = np.float32(max(edge, 0.0)).view(np.uint32)
    return key


def _to_value(key: np.uint32) -> float:
    return float(key.view(np.float32))

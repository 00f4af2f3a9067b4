"""Everything travels, in fewer bits: every value method as one expression.

Parameters for which `dense` holds (a rule as `vectors`, or patterns) are averaged exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.combinators import Route, Rule
from thinwire.combinators import dense as _dense
from thinwire.frames.shared import Identity
from thinwire.protocols import Memory, Reducer
from thinwire.recipes.options import remembered, rule, schedulable
from thinwire.reducers import Project
from thinwire.wire import Wire
from thinwire.wire.blocks import Fp8, Int8, Levels, Natural, OneBit, Signs
from thinwire.wire.values import Bf16, Half, ValueCodec

Exact = Rule | Sequence[str] | None


def dense() -> Reducer:
    """Plain averaging: what DDP does by itself.

    Source: none needed.
    """
    return _dense()


def half(*, memory: str | Memory = "none", warmup: int = 0) -> Reducer:
    """16 bits a value (IEEE half, scaled by a power of two), summed in single precision.

    Source: Micikevicius et al., ICLR 2018, arXiv 1710.03740.
    """
    return _rounded(Half(), memory, warmup)


def bf16(*, memory: str | Memory = "none", warmup: int = 0) -> Reducer:
    """16 bits a value (bfloat16), summed in single precision.

    Source: Kalamkar et al. 2019, arXiv 1905.12322.
    """
    return _rounded(Bf16(), memory, warmup)


@schedulable
def fp8(
    *,
    block: int = 256,
    dense: Exact = None,
    memory: str | Memory = "residual",
    warmup: int = 0,
) -> Reducer:
    """8 bits a value (e4m3) and a scale a block.

    Source: Micikevicius et al. 2022, arXiv 2209.05433.
    """
    return _rounded(Fp8(block), memory, warmup, dense)


@schedulable
def int8(
    *,
    block: int = 256,
    dense: Exact = None,
    memory: str | Memory = "residual",
    warmup: int = 0,
) -> Reducer:
    """8 bits a value, rounded to the nearest of 255 levels of a block's largest.

    Source: Dettmers, ICLR 2016, arXiv 1511.04561; blocks as in ZeRO++, arXiv 2306.10209.
    """
    return _rounded(Int8(block), memory, warmup, dense)


def natural(
    *,
    seed: int = 0,
    dense: Exact = None,
    memory: str | Memory = "residual",
    warmup: int = 0,
) -> Reducer:
    """8 bits a value: sign and exponent, the mantissa rounded at random.

    Source: Horvath et al., MSML 2022, arXiv 1905.10988.
    """
    return _rounded(Natural(seed=seed), memory, warmup, dense)


@schedulable
def qsgd(
    bits: int = 4,
    *,
    block: int = 512,
    norm: str = "max",
    seed: int = 0,
    dense: Exact = None,
    memory: str | Memory = "residual",
    warmup: int = 0,
) -> Reducer:
    """A few levels of a block's largest, rounded at random; without memory unbiased, as published.

    The theorem is of the block's norm (`norm="l2"`), which loses far more. With a memory the scale
    is fitted by least squares, so that the error cannot grow.
    Source: Alistarh et al., NeurIPS 2017, arXiv 1610.02132.
    """
    fitted = memory != "none"
    return _rounded(
        Levels(bits=bits, block=block, norm=norm, fitted=fitted, seed=seed), memory, warmup, dense
    )


@schedulable
def terngrad(
    *,
    clip: float | None = 2.5,
    block: int = 512,
    seed: int = 0,
    dense: Exact = None,
    memory: str | Memory = "residual",
    warmup: int = 0,
) -> Reducer:
    """2 bits a value: -1, 0 or 1 times a block's largest, at random; values held at `clip` sigma.

    With a memory the scale is fitted by least squares, so that the error cannot grow.
    Source: Wen et al., NeurIPS 2017, arXiv 1705.07878.
    """
    fitted = memory != "none"
    codec = Levels(bits=2, block=block, norm="max", clip=clip, fitted=fitted, seed=seed)
    return _rounded(codec, memory, warmup, dense)


@schedulable
def signsgd(
    *,
    block: int = 512,
    dense: Exact = None,
    memory: str | Memory = "residual",
    warmup: int = 0,
) -> Reducer:
    """1 bit a value: its sign, times the mean magnitude of its block (EF-signSGD).

    Source: Karimireddy et al., ICML 2019, arXiv 1901.09847.
    """
    return _rounded(Signs(block), memory, warmup, dense)


@schedulable
def onebit(
    *,
    block: int = 512,
    dense: Exact = None,
    memory: str | Memory = "residual",
    warmup: int = 0,
) -> Reducer:
    """1 bit a value: the mean of its block's positive or of its negative numbers (1-bit SGD).

    Source: Seide et al., Interspeech 2014.
    """
    return _rounded(OneBit(block), memory, warmup, dense)


def _rounded(codec: ValueCodec, memory: str | Memory, warmup: int, dense: Exact = None) -> Reducer:
    coded: Reducer = Project(frame=Identity(), wire=Wire(values=codec))
    if dense is not None:
        coded = Route(rule("dense", dense), _dense(), coded)
    return remembered(memory, warmup, coded)

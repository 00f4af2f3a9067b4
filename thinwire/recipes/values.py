"""Everything travels, in fewer bits: every value method as one expression."""

from __future__ import annotations

from typing import Unpack

from thinwire.combinators import dense as _dense
from thinwire.frames.shared import Identity
from thinwire.protocols import Reducer
from thinwire.recipes.frame import frame, route_dense
from thinwire.recipes.options import Shared
from thinwire.recipes.recipe import recipe
from thinwire.reducers import Project
from thinwire.schedule import Number, Whole, read_number
from thinwire.wire import Wire
from thinwire.wire.blocks import Fp8, Int8, Levels, Natural, OneBit, Signs
from thinwire.wire.values import Bf16, Half, ValueCodec


@recipe()
def dense() -> Reducer:
    """Plain averaging: what DDP does by itself.

    Example:
        dense()

    Source: none needed.
    """
    return _dense()


@recipe(memory="none")
def half(**shared: Unpack[Shared]) -> Reducer:
    """16 bits per value: IEEE half, scaled, summed in fp32.

    The scale is a power of two, and without a memory nothing is kept back.

    Args:
        **shared: See `thinwire.recipes.options.Shared`.

    Example:
        half()

    Source: Micikevicius et al., ICLR 2018, arXiv 1710.03740.
    """
    return _coded(Half(), shared)


@recipe(memory="none")
def bf16(**shared: Unpack[Shared]) -> Reducer:
    """16 bits per value: bfloat16, summed in fp32.

    Args:
        **shared: See `thinwire.recipes.options.Shared`.

    Example:
        bf16(memory="residual")

    Source: Kalamkar et al. 2019, arXiv 1905.12322.
    """
    return _coded(Bf16(), shared)


@recipe()
def fp8(*, block: Whole = 256, **shared: Unpack[Shared]) -> Reducer:
    """8 bits per value (e4m3), with one scale per block.

    Args:
        block: Values that share a scale.
        **shared: See `thinwire.recipes.options.Shared`.

    Example:
        fp8(block=128)

    Source: Micikevicius et al. 2022, arXiv 2209.05433.
    """
    return _coded(Fp8(read_number(block)), shared)


@recipe()
def int8(*, block: Whole = 256, **shared: Unpack[Shared]) -> Reducer:
    """8 bits per value: 255 levels of a block's largest.

    Args:
        block: Values that share a scale.
        **shared: See `thinwire.recipes.options.Shared`.

    Example:
        int8(dense=["norm"])

    Source: Dettmers, ICLR 2016, arXiv 1511.04561; blocks as in ZeRO++, arXiv 2306.10209.
    """
    return _coded(Int8(read_number(block)), shared)


@recipe()
def int4(*, block: Whole = 192, **shared: Unpack[Shared]) -> Reducer:
    """4 bits per value: the nearest of 15 levels.

    A block's scale is fitted by least squares. Under feedback this loses far less than rounding at
    random, as `qsgd` does.

    Args:
        block: Values that share a scale.
        **shared: See `thinwire.recipes.options.Shared`.

    Example:
        int4(block=128)

    Source: our own, after QSGD (arXiv 1610.02132) and error feedback (arXiv 1901.09847).
    """
    levels = Levels(bits=4, block=read_number(block), norm="max", fitted=True, nearest=True)
    return _coded(levels, shared)


@recipe()
def natural(*, seed: int = 0, **shared: Unpack[Shared]) -> Reducer:
    """8 bits per value: sign and exponent, rounded at random.

    Args:
        seed: Seed of the rounding.
        **shared: See `thinwire.recipes.options.Shared`.

    Example:
        natural(seed=1)

    Source: Horvath et al., MSML 2022, arXiv 1905.10988.
    """
    return _coded(Natural(seed=seed), shared)


@recipe()
def qsgd(
    bits: Whole = 4,
    *,
    block: Whole = 512,
    norm: str = "max",
    seed: int = 0,
    **shared: Unpack[Shared],
) -> Reducer:
    """2, 4 or 8 bits per value, rounded at random.

    Without a memory the mean is unbiased, as published. With one the scale is fitted by least
    squares, so that the error cannot grow.

    Args:
        bits: Bits per value: 2, 4 or 8.
        block: Values that share a scale.
        norm: "max" scales by the largest of a block. "l2" scales by its norm, as in the theorem,
            and loses far more.
        seed: Seed of the rounding.
        **shared: See `thinwire.recipes.options.Shared`.

    Example:
        qsgd(bits=Piecewise((1000,), (8, 4)))

    Source: Alistarh et al., NeurIPS 2017, arXiv 1610.02132.
    """
    fitted = shared["memory"] != "none"
    levels = Levels(
        bits=read_number(bits), block=read_number(block), norm=norm, fitted=fitted, seed=seed
    )
    return _coded(levels, shared)


@recipe()
def terngrad(
    *,
    clip: Number | None = 2.5,
    block: Whole = 512,
    seed: int = 0,
    **shared: Unpack[Shared],
) -> Reducer:
    """2 bits per value: -1, 0 or 1 times a block's largest.

    Rounding is random. With a memory the scale is fitted by least squares, so that the error cannot
    grow.

    Args:
        clip: Values are held within so many standard deviations. None leaves them as they are.
        block: Values that share a scale.
        seed: Seed of the rounding.
        **shared: See `thinwire.recipes.options.Shared`.

    Example:
        terngrad(dense=vectors)

    Source: Wen et al., NeurIPS 2017, arXiv 1705.07878.
    """
    levels = Levels(
        bits=2, block=read_number(block), norm="max", clip=read_number(clip),
        fitted=shared["memory"] != "none", seed=seed,
    )  # fmt: skip
    return _coded(levels, shared)


@recipe()
def signsgd(*, block: Whole = 512, **shared: Unpack[Shared]) -> Reducer:
    """1 bit per value: the sign, times its block's mean.

    This is EF-signSGD: the mean is that of magnitudes.

    Args:
        block: Values that share a scale.
        **shared: See `thinwire.recipes.options.Shared`.

    Example:
        signsgd(memory="momentum")

    Source: Karimireddy et al., ICML 2019, arXiv 1901.09847.
    """
    return _coded(Signs(read_number(block)), shared)


@recipe()
def onebit(*, block: Whole = 512, **shared: Unpack[Shared]) -> Reducer:
    """1 bit per value: a block's mean above or below zero.

    This is 1-bit SGD: two means per block.

    Args:
        block: Values that share two means.
        **shared: See `thinwire.recipes.options.Shared`.

    Example:
        onebit(dense=vectors)

    Source: Seide et al., Interspeech 2014.
    """
    return _coded(OneBit(read_number(block)), shared)


def _coded(codec: ValueCodec, shared: Shared) -> Reducer:
    coded = Project(frame=Identity(), wire=Wire(values=codec))
    return frame(route_dense(coded, shared), shared)

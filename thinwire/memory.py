"""Memories: what becomes of the gradient that was not sent this step.

A memory hands on an unevaluated `Sum`; whoever needs the numbers calls `take()`, which adds the
gradient into the residual in place. After the exchange the residual is `x - sent`, with `sent`
this rank's true share of the mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from thinwire.operand import Sum, working_dtype
from thinwire.payload import Payload
from thinwire.state import State


@dataclass(frozen=True, kw_only=True)
class Residual:
    """Plain error feedback: what was not sent is added to the next gradient.

    Seide et al. 2014; Karimireddy et al. 2019 (arXiv 1901.09847).
    """

    def fold(self, grad: Tensor, state: State) -> Sum:
        like = grad.new_empty(0, dtype=working_dtype(grad.dtype))
        return Sum(state.flat("residual", like), grad)

    def keep(self, x: Tensor, sent: Payload, state: State) -> None:
        sent.add_into(x, alpha=-1.0)

"""The alpha-beta cost of one exchange: messages one after the other, and words that a rank sends.

    seconds = messages * alpha + words * beta        d entries, k of them kept, P ranks, rank r

Words are four bytes; an entry with its index is two. Logarithms are of base 2, rounded up. Sources:
gTop-k (arXiv 1901.04359), Ok-Topk (arXiv 2201.07598, table 1), SparDL (arXiv 2304.00737), PowerSGD
and ACP-SGD as published, their matrices taken as square; halving is Rabenseifner's all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is averaged, among how many."""

    d: int
    k: int
    world: int
    rank: int = 4
    side: int = 1024  # of a matrix, for the low-rank methods

    def __post_init__(self) -> None:
        for name in ("d", "k", "world", "rank", "side"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.k > self.d:
            raise ValueError(f"k must be at most d, got k={self.k}, d={self.d}")

    @property
    def log(self) -> int:
        return math.ceil(math.log2(self.world))

    @property
    def factors(self) -> float:
        """Numbers in all left factors, or in all right ones: d / side^2 matrices of side * rank."""
        return self.d * min(self.rank, self.side) / self.side


@dataclass(frozen=True)
class Cost:
    """One method: how many messages on the critical path, how many words at worst."""

    name: str
    latency: str  # the messages as papers write them
    bandwidth: str  # and the words
    messages: Callable[[Problem], float]
    words: Callable[[Problem], float]

    def seconds(self, problem: Problem, alpha: float, beta: float) -> float:
        return self.messages(problem) * alpha + self.words(problem) * beta


COSTS = (
    Cost("dense (ring)", "2(P-1)", "2d(P-1)/P",
         lambda p: 2 * (p.world - 1), lambda p: 2 * p.d * (p.world - 1) / p.world),
    Cost("dense (halving)", "2 log P", "2d(P-1)/P",
         lambda p: 2 * p.log, lambda p: 2 * p.d * (p.world - 1) / p.world),
    Cost("16-bit (halving)", "2 log P", "d(P-1)/P",
         lambda p: 2 * p.log, lambda p: p.d * (p.world - 1) / p.world),
    Cost("Top-k (all-gather)", "log P", "2k(P-1)",
         lambda p: p.log, lambda p: 2 * p.k * (p.world - 1)),
    Cost("gTop-k (tree)", "2 log P", "4k log P",
         lambda p: 2 * p.log, lambda p: 4 * p.k * p.log),
    Cost("gTop-k (butterfly)", "log P", "2k log P",
         lambda p: p.log, lambda p: 2 * p.k * p.log),
    Cost("TopkDSA (worst)", "P + 2 log P", "(2k + d)(P-1)/P",
         lambda p: p.world + 2 * p.log if p.world > 1 else 0,
         lambda p: (2 * p.k + p.d) * (p.world - 1) / p.world),
    Cost("TopkDSA (best)", "P + 2 log P", "4k(P-1)/P",
         lambda p: p.world + 2 * p.log if p.world > 1 else 0,
         lambda p: 4 * p.k * (p.world - 1) / p.world),
    Cost("Ok-Topk (worst)", "2P + 2 log P", "6k(P-1)/P",
         lambda p: 2 * p.world + 2 * p.log if p.world > 1 else 0,
         lambda p: 6 * p.k * (p.world - 1) / p.world),
    Cost("SparDL", "2 log P", "4k(P-1)/P",
         lambda p: 2 * p.log, lambda p: 4 * p.k * (p.world - 1) / p.world),
    Cost("PowerSGD", "4(P-1)", "4(dr/n)(P-1)/P",
         lambda p: 4 * (p.world - 1), lambda p: 4 * p.factors * (p.world - 1) / p.world),
    Cost("ACP-SGD", "2(P-1)", "2(dr/n)(P-1)/P",
         lambda p: 2 * (p.world - 1), lambda p: 2 * p.factors * (p.world - 1) / p.world),
)  # fmt: skip

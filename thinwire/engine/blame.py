"""Whom to name when an exchange does not end: from what is known of every rank, never a bystander.

    left                   it said so, or its connection closed
    silent                 nothing was heard for long: it is stopped, or cut off
    outside of exchanges   alive, but it does not come
    in another exchange    ranks do not take the same steps

in this order, since a rank that is silent keeps others waiting in earlier exchanges than ours.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

LOST = "is gone: killed, crashed, or its machine lost (its connection closed without a word)"


@dataclass(frozen=True)
class Place:
    """How far a rank is: the bucket of the step it is in, how many it has done since it began, and
    whether it waits for others."""

    step: int = 0
    bucket: int = 0
    done: int = 0
    inside: bool = False

    def __str__(self) -> str:
        return f"bucket {self.bucket} of step {self.step}"


@dataclass
class Known:
    """What is known of another rank: when it was last heard, where it was, why and when it left."""

    heard: float = field(default_factory=time.monotonic)
    place: Place = field(default_factory=Place)
    left: str | None = None  # why there will be no more of it
    left_at: float = 0.0

    def owes(self, place: Place) -> bool:
        """Whether one who waits at this place may still need something of it: whoever is past that
        exchange has sent its part, unless that was lost with it."""
        return self.left == LOST or self.place.done <= place.done


def missing(
    rank: int, place: Place, others: Mapping[int, Known], waited: float, least: float
) -> str:
    """Who keeps an exchange from ending in which this rank has waited for so many seconds; silent
    is who was not heard for a quarter of them, and for `least` seconds."""
    lost = gone(rank, place, others, waited, least)
    if lost is not None:
        return lost
    others = {other: known for other, known in others.items() if known.owes(place)}
    outside = [other for other, known in others.items() if not known.place.inside]
    if outside:
        return (
            f"{_named(outside)} did not come to {place} within {waited:.0f} s: alive, but outside "
            f"of any exchange since {others[outside[0]].place}; all ranks must take the same steps"
        )
    apart = [f"rank {o} in {k.place}" for o, k in others.items() if str(k.place) != str(place)]
    if apart:
        return (
            f"ranks are in different exchanges after {waited:.0f} s: rank {rank} in {place}, "
            f"{', '.join(apart)}; all ranks must take the same steps"
        )
    return (
        f"all ranks wait for one another in {place} for {waited:.0f} s: a link between two of them "
        "is cut, or too slow for the time-out"
    )


def gone(
    rank: int, place: Place, others: Mapping[int, Known], waited: float, least: float
) -> str | None:
    """Who will come nowhere any more: the first that left, else who is silent."""
    left = {other: known for other, known in others.items() if known.left and known.owes(place)}
    if left:
        first = min(left, key=lambda other: left[other].left_at)
        return f"rank {first} {left[first].left}"
    longest = max(least, waited / 4)
    now = time.monotonic()
    there = {other: now - known.heard for other, known in others.items() if not known.left}
    silent = {other: silence for other, silence in there.items() if silence > longest}
    return _unheard(rank, silent, len(there)) if silent else None


def _unheard(rank: int, silent: Mapping[int, float], others: int) -> str:
    seconds = f"nothing heard for {min(silent.values()):.0f} s"
    if len(silent) == others > 1:
        return (
            f"no other rank answers rank {rank} ({seconds}): its own link is cut, or all of them "
            "are lost"
        )
    verb = "does" if len(silent) == 1 else "do"
    return f"{_named(list(silent))} {verb} not answer ({seconds}): stopped, or cut off"


def _named(ranks: list[int]) -> str:
    names = [f"rank {rank}" for rank in sorted(ranks)]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

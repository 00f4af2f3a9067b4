"""Whom to name: from what is known of the others, and never one who owes nothing."""

from __future__ import annotations

import time

from thinwire.engine.blame import LOST, Known, Place, missing

HERE = Place(step=5, bucket=1, done=11, inside=True)


def heard(silence: float, place: Place, left: str | None = None) -> Known:
    """A rank that was last heard so many seconds ago."""
    return Known(time.monotonic() - silence, place, left, 1.0 if left else 0.0)


def said(**others: Known) -> str:
    ranks = {int(name[1:]): known for name, known in others.items()}
    return missing(0, HERE, ranks, 6.0, 1.5)


def test_who_left_after_its_part_was_sent_is_not_blamed() -> None:
    frozen = heard(5.0, Place(step=5, bucket=0, done=10, inside=True))
    ended = heard(4.0, Place(step=5, bucket=1, done=12), left="has left: it detached")
    assert said(r1=frozen, r2=ended).startswith("rank 1 does not answer")


def test_who_is_ahead_is_not_said_to_be_missing() -> None:
    ahead = heard(0.1, Place(step=6, bucket=0, done=12))
    assert "rank 2" not in said(r1=heard(0.1, Place(step=5, bucket=1, done=11)), r2=ahead)
    assert said(r2=ahead).startswith("all ranks wait for one another")


def test_who_was_lost_is_blamed_even_if_it_was_ahead() -> None:
    """What it had sent may be lost with it."""
    lost = heard(4.0, Place(step=6, done=12), left=LOST)
    assert said(r1=heard(0.1, HERE), r2=lost) == f"rank 2 {LOST}"


def test_who_has_left_is_not_counted_among_those_who_do_not_answer() -> None:
    ended = heard(4.0, Place(step=5, bucket=1, done=12), left="has left")
    silent = heard(5.0, HERE)
    assert said(r1=silent, r2=silent, r3=ended).startswith("no other rank answers rank 0")

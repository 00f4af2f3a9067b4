"""Whom to name: from what is known of the others, and never one who owes nothing."""

from __future__ import annotations

from thinwire.engine.blame import Known, Place, missing

HERE = Place(step=5, bucket=1, done=11, inside=True)


def said(**others: Known) -> str:
    ranks = {int(name[1:]): known for name, known in others.items()}
    return missing(0, HERE, ranks, 6.0, 1.5)


def test_who_left_after_its_part_was_sent_is_not_blamed() -> None:
    frozen = Known(5.0, Place(step=5, bucket=0, done=10, inside=True))
    ended = Known(4.0, Place(step=5, bucket=1, done=12), left="has left: it detached", left_at=1.0)
    assert said(r1=frozen, r2=ended).startswith("rank 1 does not answer")


def test_who_is_ahead_is_not_said_to_be_missing() -> None:
    ahead = Known(0.1, Place(step=6, bucket=0, done=12))
    assert "rank 2" not in said(r1=Known(0.1, Place(step=5, bucket=1, done=11)), r2=ahead)
    assert said(r2=ahead).startswith("all ranks wait for one another")


def test_who_was_lost_is_blamed_even_if_it_was_ahead() -> None:
    """What it had sent may be lost with it."""
    lost = Known(4.0, Place(step=6, done=12), left="is gone", left_at=1.0, lost=True)
    assert said(r1=Known(0.1, HERE), r2=lost) == "rank 2 is gone"


def test_who_has_left_is_not_counted_among_those_who_do_not_answer() -> None:
    ended = Known(4.0, Place(step=5, bucket=1, done=12), left="has left", left_at=1.0)
    silent = Known(5.0, HERE)
    assert said(r1=silent, r2=silent, r3=ended).startswith("no other rank answers rank 0")

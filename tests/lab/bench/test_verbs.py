"""How full the wire is: forms send the same bytes, and shares are bytes over rate and time."""

from __future__ import annotations

import pytest

from thinwire_lab.bench import verbs
from thinwire_lab.local import netns


@pytest.mark.slow
def test_at_once_and_in_turns_send_the_same_bytes():
    rows = verbs.measure(3, "none", sizes=(12_000, 600_000), turns=1)
    assert all(row.full is None and row.seconds > 0 for row in rows)
    sent = {(row.verb, row.size): row.bytes_sent for row in rows}
    for size in (12_000, 600_000):
        for verb in ("all_to_all", "all_gather"):
            same = {sent[f"{verb} {form}", size] for form in ("at once", "in turns")}
            assert same == {2 * size / 3}


@pytest.mark.slow
@pytest.mark.skipif(netns.unavailable() is not None, reason=str(netns.unavailable()))
def test_a_share_is_of_the_rate_of_the_link():
    for row in verbs.measure(2, "100mbit", sizes=(1_000_000,), turns=1):
        assert row.full == pytest.approx(8 * row.bytes_sent / 1e8 / row.seconds)
        assert 0.2 < row.full < 1.5  # of 40 to 80 ms; a bucket of tokens lets a little through

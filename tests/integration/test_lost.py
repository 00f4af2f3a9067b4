"""One rank is lost: every other one names it, and ends within the time-out and five seconds.

A few of the cases of `python -m tests.lost`, which takes hundreds of them.
"""

from __future__ import annotations

import pytest

from tests.lost import Case, faults, run
from thinwire_lab.local import netns

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # starting may take long beside others

REASON = netns.unavailable()
CASES = {
    "killed, with the store": Case(fault="kill", phase="backward", kind="topk", victim=0),
    "stopped, with the store": Case(
        fault="stop", phase="between", kind="gtopk", mode="distribute", victim=0
    ),
    "stopped in the lane": Case(fault="stop", phase="select", victim=2),
    "raises in forward": Case(fault="raise", phase="forward", kind="acpsgd", mode="distribute"),
    "stopped while others wait for its buffers": Case(
        fault="stop", phase="between", kind="dense", victim=0, world=4
    ),
    "killed in an exchange": Case(fault="kill", phase="exchange", kind="slots", victim=1, world=4),
    "stopped before it attaches": Case(fault="stop", phase="attach", victim=2),
    "raises in the lane": Case(fault="raise", phase="select", victim=0),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_who_is_lost_is_named_in_time_by_all(case: Case) -> None:
    assert faults(case, run(case)) == []


@pytest.mark.skipif(REASON is not None, reason=f"no shaped networks here: {REASON}")
@pytest.mark.parametrize("victim", [0, 1])
def test_who_is_cut_off_is_named_by_the_others_and_accuses_nobody(victim: int) -> None:
    case = Case(fault="cut", phase="backward", victim=victim)
    ended = run(case)
    assert faults(case, ended) == []
    assert f"no other rank answers rank {victim}" in ended[victim].said

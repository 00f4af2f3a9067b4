"""Lines between ranks: who is named when an exchange does not end, and by whom it is learned."""

from __future__ import annotations

import gc
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from thinwire.engine import lines as module
from thinwire.engine.blame import LOST
from thinwire.engine.lines import FAILED, HEAD, HERE, Lines


def connected(world: int) -> list[Lines]:
    """The lines of all ranks of a world, in one process."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(world)]
    for a, b in itertools.combinations(range(world), 2):
        ends[a][b], ends[b][a] = socket.socketpair()
    return [Lines(rank, ends[rank]) for rank in range(world)]


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Lines]]:
    monkeypatch.setattr(module, "PULSE", 0.02)
    world = connected(3)
    yield world
    for lines in world:
        lines.leave("done", 0.0)


def until(said: Callable[[], Any]) -> Any:
    """What it says, once it says anything: a busy machine may take its time."""
    deadline = time.monotonic() + 60.0
    while not (found := said()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return found


def freeze(lines: Lines) -> None:
    """As SIGSTOP does: the thread is gone, the sockets stay."""
    lines.close_sockets = lambda: None  # type: ignore[method-assign]
    lines._closing = True
    lines._wake.send(b".")
    lines._thread.join()


def test_the_first_failure_is_everybodys(three: list[Lines]) -> None:
    three[1].tell_failure("rank 1 failed in step 3: KeyError: 'x'")
    assert until(lambda: three[0].failure) == "rank 1 failed in step 3: KeyError: 'x'"
    assert until(lambda: three[2].failure) == three[0].failure
    three[2].tell_failure("rank 2 failed later")
    time.sleep(0.05)
    assert "rank 1" in (three[0].failure or "")


def test_a_rank_that_stops_is_the_one_that_does_not_answer(three: list[Lines]) -> None:
    for lines in three:
        lines.place = replace(lines.place, inside=True)
    freeze(three[1])
    said = until(lambda: (m := three[0].missing(0.4)).startswith("rank 1 does") and m)
    assert "rank 1 does not answer" in said
    assert "rank 2" not in said


def test_who_is_cut_off_accuses_nobody(three: list[Lines]) -> None:
    freeze(three[1])
    freeze(three[2])
    said = until(lambda: (m := three[0].missing(0.4)).startswith("no other") and m)
    assert said.startswith("no other rank answers rank 0")
    assert "its own link" in said


def test_who_is_alive_but_does_not_come_is_told_from_who_waits(three: list[Lines]) -> None:
    three[0].place = replace(three[0].place, step=7, inside=True)
    three[2].place = replace(three[2].place, step=7, inside=True)
    three[1].place = replace(three[1].place, step=6, bucket=2)
    expected = (
        "rank 1 did not come to bucket 0 of step 7 within 60 s: alive, but outside of any exchange "
        "since bucket 2 of step 6"
    )
    assert until(lambda: three[0].missing(60.0).startswith(expected))


def test_ranks_in_different_exchanges_are_shown_with_both_sides(three: list[Lines]) -> None:
    for step, lines in enumerate(three):
        lines.place = replace(lines.place, step=5 + (step == 1), inside=True)
    said = until(lambda: (m := three[0].missing(60.0)).startswith("ranks are") and m)
    assert "rank 0 in bucket 0 of step 5" in said
    assert "rank 1 in bucket 0 of step 6" in said


def test_a_rank_that_dies_is_gone_at_once(three: list[Lines]) -> None:
    freeze(three[1])
    Lines.close_sockets(three[1])
    assert until(lambda: three[0].gone(0.0)) == f"rank 1 {LOST}"
    assert until(lambda: three[2].gone(0.0)) == f"rank 1 {LOST}"
    assert LOST in three[0].missing(1.0)


def test_a_rank_that_leaves_after_its_part_is_done_is_no_loss(three: list[Lines]) -> None:
    """Its data may still be on the way; of a bucket it has not done, none will come."""
    three[1].place = replace(three[1].place, done=4)
    three[0].place = replace(three[0].place, done=3)
    three[1].leave("has left", 0.0)
    assert until(lambda: three[0]._known[1].left)
    assert three[0].gone(0.0) is None
    three[0].place = replace(three[0].place, done=4)
    assert three[0].gone(0.0) == "rank 1 has left"


def test_a_meeting_of_others_is_noticed_while_we_wait_elsewhere(three: list[Lines]) -> None:
    three[0].place = replace(three[0].place, step=9, inside=True)
    three[1].tell_meeting("pause() #1")
    said = until(lambda: three[0].elsewhere(None))
    assert "rank 1 has come to pause(), while rank 0 is in bucket 0 of step 9" in said
    assert three[0].elsewhere("pause() #1") is None
    assert "while rank 0 is at resume()" in (three[0].elsewhere("resume() #1") or "")
    three[0].forget("pause() #1")
    assert three[0].elsewhere(None) is None


def test_a_meeting_after_what_we_wait_for_is_no_disagreement(three: list[Lines]) -> None:
    three[1].place = replace(three[1].place, done=1)
    three[1].tell_meeting("pause() #1")
    until(lambda: three[0].there("pause() #1"))
    time.sleep(2 * module.HURRY)
    assert three[0].elsewhere(None) is None


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        HEAD.pack(FAILED, 1 << 30),
        HEAD.pack(HERE, 3) + b"abc",
        b"\xff" * 9,
    ],
    ids=["text", "long", "short", "kind"],
)
def test_bytes_that_are_no_message_end_the_line(garbage: bytes) -> None:
    mine, theirs = socket.socketpair()
    lines = Lines(0, {1: mine})
    theirs.send(garbage)
    assert until(lambda: lines._known[1].left) == LOST
    lines.leave("done", 0.0)
    theirs.close()


def test_a_message_longer_than_may_be_is_cut_by_the_sender() -> None:
    zero, one = connected(2)
    zero.tell_failure("x" * 200_000)
    assert len(until(lambda: one.failure)) == module.LONGEST
    for lines in (zero, one):
        lines.leave("done", 0.0)


def test_leaving_lets_go_of_threads_and_descriptors() -> None:
    def held() -> int:
        return len(os.listdir("/proc/self/fd")) + len(os.listdir("/proc/self/task"))

    gc.collect()  # of what earlier tests have left
    before = held()
    for _ in range(20):
        for lines in connected(3):
            lines.leave("done", 0.0)
    assert until(lambda: held() <= before)  # a thread that has ended is counted for a moment

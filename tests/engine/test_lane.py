"""The lane: order, completion, and errors that surface as themselves."""

from __future__ import annotations

import threading

import pytest
import torch

from thinwire.engine.lane import Lane


def test_jobs_run_in_order_on_one_thread():
    lane, seen = Lane(), []

    def job(number):
        seen.append((number, threading.get_ident()))
        return torch.tensor(number)

    futures = [lane.submit(lambda n=n: job(n), torch.zeros(1)) for n in range(50)]
    assert [int(f.wait()) for f in futures] == list(range(50))
    assert [number for number, _ in seen] == list(range(50))
    assert {ident for _, ident in seen} != {threading.get_ident()}
    assert len({ident for _, ident in seen}) == 1
    lane.wait()
    lane.close()


def test_an_error_is_raised_by_wait_and_stops_the_lane():
    lane, ran = Lane(), []

    def bad():
        raise KeyError("mine")

    fallback = torch.tensor(7)
    future = lane.submit(bad, fallback)
    later = lane.submit(lambda: ran.append(1) or torch.zeros(1), fallback)
    assert future.wait() is not None
    assert int(later.wait()) == 7
    with pytest.raises(KeyError, match="mine"):
        lane.wait()
    assert not ran

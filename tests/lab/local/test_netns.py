"""Shaped networks: links keep to their rate, and nothing stays behind."""

from __future__ import annotations

import os
import subprocess

import pytest

from thinwire_lab.local import netns, workers
from thinwire_lab.trace.record import ping

REASON = netns.unavailable()
shaped = pytest.mark.skipif(REASON is not None, reason=f"no shaped networks here: {REASON}")


def spaces() -> str:
    return subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout


def measured(rank, world, report):
    import torch.distributed as dist

    from thinwire.comm.torch import TorchComm

    return ping(TorchComm(dist.group.WORLD), size=500_000, times=5)


@shaped
@pytest.mark.slow
def test_links_have_the_rate_asked_for():
    """Half a megabyte is never faster than 40 Mbit/s, a hundredth of what loopback gives.

    There is no lower limit: a busy machine may be slower than its links.
    """
    _, beta = workers.run(2, measured, net="40mbit")[0]
    assert 8 / beta < 60e6
    assert f"thinwire-{os.getpid()}-" not in spaces()  # others may be at it too


def failing(rank, world, report):
    raise RuntimeError("on purpose")


@shaped
@pytest.mark.slow
def test_a_failing_run_leaves_no_namespace():
    with pytest.raises(workers.WorkerFailed, match="on purpose"):
        workers.run(2, failing, net="1gbit")
    assert f"thinwire-{os.getpid()}-" not in spaces()


@shaped
def test_what_a_killed_run_left_is_swept():
    name = "thinwire-4194305-0"  # above the largest process id there can be
    subprocess.run(["ip", "netns", "add", name], check=True)
    with netns.shape_network(1, "1gbit") as names:
        assert name not in spaces()
        assert names[0] in spaces()
    assert names[0] not in spaces()


def test_without_the_tools_the_way_out_is_named(monkeypatch):
    monkeypatch.setattr(netns, "unavailable", lambda: "only root may make network namespaces")
    with pytest.raises(ValueError, match="--net none"), netns.shape_network(2, "1gbit"):
        pass

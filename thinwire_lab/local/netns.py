"""A slow network on this machine: a namespace a worker, joined by a bridge, each link at a rate.

    worker r:  eth0, 10.77.0.(r+1)  --veth, tbf both ways--  bridge, in a namespace of its own

Needs root and iproute2. Traffic never leaves the namespaces, which are removed however the run
ends; what a killed run has left behind is removed by the next one.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from thinwire.plan import units

INTERFACE = "eth0"
_NEW_NET = 0x40000000  # CLONE_NEWNET
_PREFIX = "thinwire"


def unavailable() -> str | None:
    """Why shaped networks cannot be made here, or None if they can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    return None


@contextmanager
def shape_network(world: int, rate: str) -> Iterator[list[str]]:
    """Namespaces for so many workers, whose links carry `rate` each way."""
    bits = units.rate(rate)
    reason = unavailable()
    if reason:
        raise ValueError(f"cannot shape a network here ({reason}); use --net none for loopback")
    if not 1 <= world <= 250:
        raise ValueError(f"a shaped network has 1 to 250 workers, got {world}")
    _sweep()
    mark = f"{_PREFIX}-{os.getpid()}"
    names = [f"{mark}-{rank}" for rank in range(world)]
    try:
        _build(f"{mark}-bridge", names, bits)
        yield names
    finally:
        for name in [*names, f"{mark}-bridge"]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def enter(name: str) -> None:
    """Move this thread, and those it starts, into a namespace: their sockets live there."""
    with open(f"/run/netns/{name}") as handle:
        if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), _NEW_NET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


def _build(bridge: str, names: list[str], bits: float) -> None:
    _run("ip", "netns", "add", bridge)
    _run("ip", "-n", bridge, "link", "add", "br0", "type", "bridge")
    _run("ip", "-n", bridge, "link", "set", "br0", "up")
    for rank, name in enumerate(names):
        port = f"port{rank}"
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", bridge, "link", "add", port, "type", "veth",
             "peer", "name", INTERFACE, "netns", name)  # fmt: skip
        _run("ip", "-n", bridge, "link", "set", port, "master", "br0", "up")
        _run("ip", "-n", name, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", INTERFACE)
        _run("ip", "-n", name, "link", "set", INTERFACE, "up")
        for space, device in ((name, INTERFACE), (bridge, port)):
            _shape(space, device, bits)


def _shape(space: str, device: str, bits: float) -> None:
    # the bucket must hold what one timer tick lets through, or the rate is not reached
    burst = max(32_000, int(bits / 8 / 250))
    _run("tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf",
         "rate", f"{int(bits)}bit", "burst", str(burst), "latency", "100ms")  # fmt: skip


def _sweep() -> None:
    """Remove namespaces of runs that are no more."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    for line in listed.stdout.splitlines():
        found = re.match(rf"({_PREFIX}-(\d+)-\S+)", line)
        if found and not os.path.exists(f"/proc/{found[2]}"):
            subprocess.run(["ip", "netns", "del", found[1]], capture_output=True, check=False)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(
            f"the network could not be made: {' '.join(command)}: {done.stderr.strip()}; use "
            "--net none for loopback"
        )

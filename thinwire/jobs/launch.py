"""Where a worker runs: started by us, or by torchrun, srun or mpirun; on a CPU or on a GPU."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from thinwire.engine.rendezvous import interfaces, named_interfaces
from thinwire.lab.workers import Refused

# who started us: rank, world, rank on this machine, and something that names the job
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
               "PMIX_NAMESPACE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "PMI_JOBID"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_ID"),
}  # fmt: skip
PATIENCE = timedelta(seconds=30)  # to tell others what we were refused before we met


class Unheard(ValueError):
    """What this rank says itself, and leaves to no other."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """One worker among others."""

    rank: int
    world: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


def launched() -> tuple[int, int, int] | None:
    """Rank, world and local rank that a launcher gave us; None if nobody did."""
    for rank, world, local, _ in LAUNCHERS.values():
        if rank in os.environ and world in os.environ:
            return int(os.environ[rank]), int(os.environ[world]), int(os.environ.get(local, "0"))
    return None


def join(patience: timedelta | None = None) -> Place:
    """Take part in the group that a launcher has started us in; PyTorch waits half an hour."""
    found = launched()
    if found is None:
        raise ValueError("no launcher has started this process; give --workers")
    rank, world, local = found
    if "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"] = _first_host()
    os.environ.setdefault("MASTER_PORT", str(_port()))
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", local % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
    limit = patience or dist.default_pg_timeout
    store, _, _ = next(rendezvous("env://", rank, world, timeout=limit))
    _check_addresses(store, rank, world, local)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    return Place(rank=rank, world=world, device=device)


def _check_addresses(store: Any, rank: int, world: int, local: int) -> None:
    """Refuse, on all ranks in the same words, what gloo would fail at on one and hang at on the
    others: machines that take their own name for loopback, and interfaces that are not there."""
    mine = [_machine(), _own_address(), named_interfaces()]
    store.set(f"address/{rank}", json.dumps(mine))
    everyone = [json.loads(store.get(f"address/{other}")) for other in range(world)]
    one_machine = len({machine for machine, _, _ in everyone}) == 1
    said = Unheard if local == 0 else ValueError  # once on every machine
    for other, (_, address, there) in enumerate(everyone):
        if address == "":
            raise said(
                f"GLOO_SOCKET_IFNAME of worker {other} names no interface of its machine; set it "
                f"to one of {there}"
            )
        if not one_machine and ipaddress.ip_address(address).is_loopback:
            raise said(
                f"worker {other} would tell other machines its loopback address {address}; set "
                "GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME for GPUs) on every machine to the "
                f"interface that leads to the others; it has {there}"
            )


def _machine() -> str:
    """What tells this machine, or container, from others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:  # not Linux
        return socket.gethostname()


def _own_address() -> str:
    """The address that gloo will tell the others; "" if it will fail for want of the interface."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if named:
        there = {name for _, name in socket.if_nameindex()}
        return interfaces().get(named, "0.0.0.0") if named in there else ""
    for family, kind, protocol, _, address in _resolved(socket.gethostname()):
        with socket.socket(family, kind, protocol) as trial, suppress(OSError):
            trial.bind((address[0], 0))
            return str(address[0])
    return "127.0.0.1"


def _resolved(name: str) -> list[Any]:
    try:
        return socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []


@contextmanager
def refused_together(*files: Path | None) -> Iterator[None]:
    """Work before the group is joined. These files may be wrong for one rank alone: what it is
    refused it tells the others, whose first `agreed` hears it, and rank 0 says it. Without files
    all ranks are refused alike, and rank 0 needs nobody."""
    try:
        yield
    except ValueError as error:
        rank, world, _ = launched() or (0, 1, 0)
        if world == 1 or not any(files):
            raise
        try:
            join(PATIENCE)
        except (RuntimeError, ValueError):
            raise Unheard(f"worker {rank}: {error}") from None
        try:
            agreed(partial(_raised, error))
        finally:
            dist.destroy_process_group()


def _raised(error: ValueError) -> None:
    raise error


def agreed(work: Callable[[], object]) -> None:
    """Every rank's work. If any was refused all are, in the words of the first: nobody waits for a
    rank that has gone, and rank 0 can say why."""
    problem = b""
    try:
        work()
    except ValueError as error:
        problem = str(error).encode() or b"refused"
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(problem)]))
    bad = [rank for rank, size in enumerate(sizes) if int(size)]
    if not bad:
        return
    text = torch.zeros(int(sizes[bad[0]]), dtype=torch.uint8)
    if dist.get_rank() == bad[0]:
        text = torch.tensor(list(problem), dtype=torch.uint8)
    dist.broadcast(text, bad[0])
    words = bytes(text.tolist()).decode("utf-8", "replace")
    raise Refused(words if bad[0] == 0 else f"worker {bad[0]}: {words}")


def gathered(rows: Tensor) -> Tensor:
    """All ranks' rows, one below the other."""
    world = dist.get_world_size()
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(counts, torch.tensor([len(rows)]))
    most = max(int(c) for c in counts)
    padded = rows.new_zeros(most, rows.shape[1])
    padded[: len(rows)] = rows
    every = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(every, padded)
    return torch.cat([part[: int(count)] for part, count in zip(every, counts, strict=True)])


def _first_host() -> str:
    """Slurm's first machine; anyone else's workers must be on this one, or MASTER_ADDR is given."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    if nodes is None:
        return "127.0.0.1"
    ask = ["scontrol", "show", "hostnames", nodes]
    try:
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        raise ValueError(
            f"cannot tell the first of the machines {nodes}; set MASTER_ADDR"
        ) from None


def _port() -> int:
    """The same for all workers of a job, another for the next one."""
    names = [os.environ.get(job, "") for _, _, _, job in LAUNCHERS.values()]
    names.append(os.environ.get("SLURM_JOB_ID", ""))
    return 20_000 + int(sum(ord(c) * 31**i for i, c in enumerate("".join(names))) % 20_000)

"""Where a worker runs: started by us, or by torchrun, srun or mpirun; on a CPU or on a GPU."""

from __future__ import annotations

import gc
import ipaddress
import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from thinwire.engine.rendezvous import interfaces, named_interfaces
from thinwire_lab.errors import Refused, UnsharedError

T = TypeVar("T")
# who started us: rank, world, rank on this machine, and something that names the job
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
               "PMIX_NAMESPACE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "PMI_JOBID"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_ID"),
}  # fmt: skip
PATIENCE = timedelta(seconds=30)  # to tell others what we were refused before we met


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One process of a training, and the device it computes on."""

    rank: int
    world: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


def find_launcher() -> tuple[int, int, int] | None:
    """Rank, world and local rank that a launcher gave us; None if nobody did."""
    for rank, world, local, _ in LAUNCHERS.values():
        if rank in os.environ and world in os.environ:
            return int(os.environ[rank]), int(os.environ[world]), int(os.environ.get(local, "0"))
    return None


def is_first() -> bool:
    """Whether this process is the one that prints: rank 0, or alone."""
    return (find_launcher() or (0,))[0] == 0


def join(patience: timedelta = dist.default_pg_timeout) -> Worker:
    """Join the group that a launcher has started us in; PyTorch waits half an hour."""
    found = find_launcher()
    if found is None:
        raise ValueError("no launcher has started this process; give --workers")
    rank, world, local = found
    if "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"] = _find_first_host()
    os.environ.setdefault("MASTER_PORT", str(_choose_port()))
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", local % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
    store, _, _ = next(rendezvous("env://", rank, world, timeout=patience))
    _check_addresses(store, rank, world, local)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=patience)
    return Worker(rank=rank, world=world, device=device)


def _check_addresses(store: Any, rank: int, world: int, local: int) -> None:
    """Refuse, on all ranks in the same words, what gloo would fail at on one and hang at on the
    others: machines that take their own name for loopback, and interfaces that are not there."""
    mine = [_identify_machine(), _find_address(), named_interfaces()]
    store.set(f"address/{rank}", json.dumps(mine))
    everyone = [json.loads(store.get(f"address/{other}")) for other in range(world)]
    store.set(f"read/{rank}", "")
    if rank == 0:  # the store may end with rank 0
        store.wait([f"read/{other}" for other in range(world)])
    one_machine = len({machine for machine, _, _ in everyone}) == 1
    kind = UnsharedError if local == 0 else ValueError  # once on every machine
    for other, (_, address, there) in enumerate(everyone):
        if address == "":
            raise kind(
                f"GLOO_SOCKET_IFNAME of worker {other} names no interface of its machine; set it "
                f"to one of {there}"
            )
        if not one_machine and ipaddress.ip_address(address).is_loopback:
            raise kind(
                f"worker {other} would tell other machines its loopback address {address}; set "
                "GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME for GPUs) on every machine to the "
                f"interface that leads to the others; it has {there}"
            )


def _identify_machine() -> str:
    """What tells this machine, or container, from others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:  # not Linux
        return socket.gethostname()


def _find_address() -> str:
    """The address that gloo will tell the others; "" if it will fail for want of the interface."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if named:
        there = {name for _, name in socket.if_nameindex()}
        return interfaces().get(named, "0.0.0.0") if named in there else ""
    try:
        resolved = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        resolved = []
    for family, kind, protocol, _, address in resolved:
        with socket.socket(family, kind, protocol) as trial, suppress(OSError):
            trial.bind((address[0], 0))
            return str(address[0])
    return "127.0.0.1"


def leave() -> None:
    """End the group and its threads, before Python ends.

    A thread of gloo that drops the last tensors while Python shuts down kills the process (pytorch
    issue 190489). DDP and its hook hold each other, and with them the group: so they go first.
    """
    gc.collect()
    dist.destroy_process_group()


@contextmanager
def share_refusals(*files: Path | None) -> Iterator[None]:
    """Work before the group is joined. These files may be wrong for one rank alone: it tells the
    others, in their first `agree`, and rank 0 prints it. Without files all ranks are refused alike.
    """
    try:
        yield
    except ValueError as error:
        rank, world, _ = find_launcher() or (0, 1, 0)
        if world == 1 or not any(files):
            raise
        try:
            join(PATIENCE)
        except (RuntimeError, ValueError):
            raise UnsharedError(f"worker {rank}: {error}") from None
        try:
            refuse_together(str(error) or "refused")
        finally:
            leave()


def agree(work: Callable[[], T]) -> T:
    """Do every rank's work. If any rank is refused all are, in the words of the first: nobody waits
    for a rank that has gone, and rank 0 can say why."""
    problem = ""
    try:
        result = work()
    except ValueError as error:
        problem = str(error) or "refused"
    refuse_together(problem)
    return result


def refuse_together(problem: str) -> None:
    """Refuse on all ranks if one of them has a problem, in the words of the first that has."""
    for rank, words in enumerate(gather(problem)):
        if words:
            raise Refused(words if rank == 0 else f"worker {rank}: {words}")


def agree_on_first(work: Callable[[], T]) -> T:
    """Do rank 0's work, and give its result to all; if that is refused, all ranks are."""
    result = agree(lambda: work() if dist.get_rank() == 0 else None)
    return cast(T, gather(result)[0])


def gather(mine: T) -> list[T]:
    """What all ranks have, in their order."""
    every = [mine] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def _find_first_host() -> str:
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


def _choose_port() -> int:
    """The same for all workers of a job, another for the next one."""
    names = [os.environ.get(job, "") for _, _, _, job in LAUNCHERS.values()]
    names.append(os.environ.get("SLURM_JOB_ID", ""))
    return 20_000 + int(sum(ord(c) * 31**i for i, c in enumerate("".join(names))) % 20_000)

"""Ranks that are lost on purpose: what the others then say, and how soon they end.

    python -m tests.lost --cases 200        # of every fault, phase, kind, world and victim

Each case is a world of processes of its own (TCP store in rank 0, as `env://` has it).
"""

from __future__ import annotations

import argparse
import itertools
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from thinwire import attach, distribute, recipes
from thinwire.combinators import Remember
from thinwire.reducers import Select
from thinwire_lab.local import netns, workers

FAULTS = ("kill", "stop", "raise", "exit", "cut")
PHASES = ("attach", "forward", "backward", "select", "exchange", "between")
KINDS = ("dense", "topk", "gtopk", "acpsgd", "slots")
MODES = ("attach", "distribute")
WHEN = 3  # the step in which it happens
WIDTH = 24
START, END = 300.0, 60.0  # seconds: until the fault, and from there on, before we give up


@dataclass(frozen=True, kw_only=True)
class Case:
    fault: str = "kill"
    phase: str = "backward"
    kind: str = "topk"
    mode: str = "attach"
    victim: int = 1
    world: int = 3
    timeout: float = 6.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How one rank ended: its exit code, what it had raised, and seconds after the fault."""

    code: int
    said: str
    seconds: float


class _Fault:
    """Strikes once, on the victim, in the phase and step of the case."""

    def __init__(self, case: Case, rank: int, space: str | None, report: Any) -> None:
        self.case, self.mine, self.space, self.report = case, rank == case.victim, space, report
        self.step = 0

    def before(self, verb: Any) -> Any:
        def struck(*args: Any) -> Any:
            self.at("exchange")
            return verb(*args)

        return struck

    def begin(self, phase: str) -> None:
        """A phase that comes before the first step."""
        self.step = WHEN
        self.at(phase)
        self.step = 0

    def at(self, phase: str) -> None:
        if not self.mine or phase != self.case.phase or self.step != WHEN:
            return
        self.mine = False
        self.report.put(("fault", self.case.victim, "", time.monotonic()))
        time.sleep(0.1)  # the queue's thread must have written it
        if self.case.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.case.fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.case.fault == "exit":
            os._exit(7)
        elif self.case.fault == "cut":
            command = ["ip", "link", "set", netns.INTERFACE, "down"]
            subprocess.run(command, check=True)
        else:
            raise ArithmeticError(f"rank {self.case.victim} gave up on purpose")


@dataclass(frozen=True)
class _Watched:
    """A selector in which the fault may strike; ranks compare its type only."""

    fault: Any

    def __call__(self, rows: Any, k: int, state: Any) -> Any:
        self.fault.at("select")
        return rows.abs().topk(k, dim=1).indices.reshape(-1)


class _Layer(nn.Linear):
    fault: Any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fault.at("forward")
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda grad: self.fault.at("backward"))
        return y


def _work(rank: int, case: Case, port: int, space: str | None, report: Any) -> None:
    import torch.distributed as dist

    if space is not None:
        netns.enter(space)
        os.environ["GLOO_SOCKET_IFNAME"] = netns.INTERFACE
    torch.set_num_threads(1)
    host = "127.0.0.1" if space is None else "10.77.0.1"
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    fault = _Fault(case, rank, space, report)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=case.world)
        dist.barrier()  # a busy machine may take long to start them
        _train(rank, case, fault)
        report.put(("said", rank, "nothing", time.monotonic()))
    except BaseException as error:
        report.put(("said", rank, f"{type(error).__name__}: {error}", time.monotonic()))
        raise


def _train(rank: int, case: Case, fault: _Fault) -> None:
    torch.manual_seed(0)
    layers = [_Layer(WIDTH, WIDTH) for _ in range(4)]
    for layer in layers:
        layer.fault = fault
    # buffers, which DDP broadcasts before every forward
    net = nn.Sequential(*(part for layer in layers for part in (layer, nn.BatchNorm1d(WIDTH))))
    recipe: Any = getattr(recipes, case.kind)()
    if case.phase == "select":
        recipe = Remember(Select(pick=_Watched(fault), density=0.1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    if case.mode == "attach":
        model: Any = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.004)
        fault.begin("attach")
        sync = attach(model, recipe, timeout=case.timeout)
    else:
        model = net
        fault.begin("attach")
        sync = distribute(
            optimizer, net.named_parameters(), recipe, timeout=case.timeout, bucket_mb=0.003
        )
    comm = sync._intake.peers.comm
    for verb in ("_finish", "_swap"):  # in these it has begun
        setattr(comm, verb, fault.before(getattr(comm, verb)))
    for step in range(WHEN + 40):
        fault.step = step
        fault.at("between")
        model(torch.randn(4, WIDTH)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sync.detach()


def run(case: Case) -> dict[int, Ended]:
    """How every rank ended; one that had to be killed by us after a minute has code None's like."""
    if case.fault == "cut":
        with netns.shape_network(case.world, "1gbit") as spaces:
            return _run(case, spaces)
    return _run(case, [None] * case.world)


def _run(case: Case, spaces: list[Any]) -> dict[int, Ended]:
    context = workers.choose_context()
    report = context.Queue()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    ranks = [
        context.Process(target=_work, args=(rank, case, port, spaces[rank], report))
        for rank in range(case.world)
    ]
    for process in ranks:
        process.start()
    said, ends, struck = _await(ranks, case, report)
    for process in ranks:
        process.kill()
        process.join()
    return {
        rank: Ended(
            code=process.exitcode if rank in ends else -99,
            said=said.get(rank, ""),
            seconds=ends.get(rank, float("inf")) - struck,
        )
        for rank, process in enumerate(ranks)
    }


def _await(
    ranks: list[Any], case: Case, report: Any
) -> tuple[dict[int, str], dict[int, float], float]:
    """What they said, when each ended, and when the fault struck: a busy machine may take long
    until then, but not from there on. One that is stopped is not waited for."""
    said: dict[int, str] = {}
    ends: dict[int, float] = {}
    struck = float("inf")
    wanted = {r for r in range(case.world) if not (r == case.victim and case.fault == "stop")}
    begun = time.monotonic()
    while wanted - set(ends) and time.monotonic() < min(begun + START, struck + END):
        ends.update({r: time.monotonic() for r in wanted - set(ends) if not ranks[r].is_alive()})
        with suppress(queue.Empty):
            while True:
                kind, rank, text, at = report.get(timeout=0.02)
                if kind == "fault":
                    struck = at
                else:
                    said[rank] = text
    return said, ends, struck


def faults(case: Case, ended: dict[int, Ended]) -> list[str]:
    """What is wrong with how the others ended: who was not named, who was blamed, who was late."""
    wrong = []
    v = case.victim
    alone = (f"no other rank answers rank {v}", f"rank {v} found no way to rank", "does not answer")
    if case.fault == "cut" and not any(
        text in ended[v].said for text in alone[: 3 if case.world == 2 else 2]
    ):
        wrong.append(f"who was cut off does not say so: {ended[v].said}")
    survivors = [rank for rank in range(case.world) if rank != case.victim]
    for rank in survivors:
        end, others = ended[rank], [r for r in survivors if r != rank]
        if f"rank {case.victim}" not in end.said:
            wrong.append(f"rank {rank} does not name rank {case.victim}: {end.said}")
        if any(f"rank {other} " in end.said.split(" (")[0] for other in others):
            wrong.append(f"rank {rank} accuses a bystander: {end.said}")
        if end.seconds > case.timeout + 5.0:
            wrong.append(f"rank {rank} took {end.seconds:.1f} s")
        if end.code != 1:
            wrong.append(f"rank {rank} ended with {end.code}: {end.said}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a fault")
    options = parser.parse_args()
    kinds = [f for f in FAULTS if f != "cut" or netns.unavailable() is None]
    grid = [
        Case(fault=fault, phase=phase, kind=kind, mode=mode, victim=victim, world=world)
        for fault, phase, kind, mode, world in itertools.product(
            [options.only] if options.only else kinds, PHASES, KINDS, MODES, (2, 3, 4)
        )
        for victim in range(world)
        if phase not in ("attach", "select") or kind == "topk"  # the recipe makes no difference
    ]
    random.Random(options.seed).shuffle(grid)
    bad = 0
    for number, case in enumerate(itertools.islice(itertools.cycle(grid), options.cases)):
        ended = run(case)
        wrong = faults(case, ended)
        bad += bool(wrong)
        slowest = max(e.seconds for r, e in ended.items() if r != case.victim)
        print(number, f"{slowest:.1f} s", case, *wrong, sep="\n    " if wrong else " ", flush=True)
    print(f"{options.cases - bad} of {options.cases} ended as they should")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()

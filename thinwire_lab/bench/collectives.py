"""How long one bucket takes with each collective, beside the dense all-reduce of the same bucket.

Selection, error feedback and codes included: what a training step would wait for. Contenders take
turns; figures are means over a whole number of refresh periods, because some steps cost more. Over
MPI this file is its own program, started by mpirun with a trial and the file for its answer.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from thinwire import kernels, recipes
from thinwire.bucket import Bucket
from thinwire.collectives.oktopk import OkTopk
from thinwire.collectives.slots import Slots
from thinwire.collectives.split import SplitReduce
from thinwire.combinators import dense
from thinwire.comm.metered import Metered
from thinwire.protocols import Comm, Reducer
from thinwire_lab.errors import WorkerFailed
from thinwire_lab.local import workers

DENSE = "dense all-reduce"
COMMS = ("gloo", "mpi")
GRADIENTS = 4  # different ones, in turn
WARM = 4  # steps that do not count
TURN = 16  # steps at a time


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One bucket of so many gradients, in so many ranks."""

    numel: int = 4_200_000
    density: float = 0.01
    world: int = 4
    comm: str = "gloo"
    net: str = "none"
    steps: int = 64
    wire: str = "fp32"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One collective: mean seconds and bytes a step, on rank 0."""

    name: str
    seconds: float
    bytes_sent: float


def contenders(trial: Trial) -> dict[str, Reducer]:
    """Every collective, in each of the forms it has."""
    options: dict[str, Any] = {"density": trial.density, "wire": trial.wire}
    return {
        DENSE: dense(),
        "AllGather": recipes.topk(**options),
        "GTopK": recipes.gtopk(**options),
        "GTopK, tree": recipes.gtopk(tree=True, **options),
        "SplitReduce": recipes.topkdsa(**options),
        "SplitReduce, pairwise": recipes.topkdsa(
            collective=SplitReduce(form="pairwise"), **options
        ),
        "Ok-Topk": recipes.oktopk(collective=OkTopk(form="all_to_all"), **options),
        "Ok-Topk, pairwise": recipes.oktopk(**options),
        "Slots": recipes.slots(**options),
        "Slots, pairwise": recipes.slots(collective=Slots(form="pairwise"), **options),
        "SparDL": recipes.spardl(**options),
    }


def turns(trial: Trial) -> int:
    """How many reports there will be."""
    return len(contenders(trial)) * -(-trial.steps // TURN) if trial.comm == "gloo" else 1


def measure(trial: Trial, on_report: Callable[[str], None] = lambda name: None) -> list[Row]:
    """A row for each contender."""
    if trial.comm not in COMMS:
        raise ValueError(f"comm must be {' or '.join(COMMS)}, got {trial.comm!r}")
    contenders(trial)  # a bad density is the caller's error, before any process is started
    if trial.comm == "gloo":
        return workers.run(trial.world, _worker, trial, on_report=on_report, net=trial.net)[0]
    if trial.net != "none":
        raise ValueError("mpirun starts its own workers: --comm mpi needs --net none")
    return _measure_over_mpi(trial)


def _worker(rank: int, world: int, report: Any, trial: Trial) -> list[Row]:
    import torch.distributed as dist

    from thinwire.comm.torch import TorchComm

    group = dist.group.WORLD
    assert group is not None
    return _rows(TorchComm(group), trial, report if rank == 0 else _silent)


class _Running:
    """One contender, its state, and what it took so far."""

    def __init__(self, recipe: Reducer, comm: Comm) -> None:
        self._recipe, self._comm, self._meter = recipe, comm, Metered(comm)
        self._state: dict[str, Any] = {}
        self._step = 0
        self.seconds, self.bytes = 0.0, 0

    def turn(self, gradients: list[torch.Tensor], steps: int, *, counts: bool = True) -> None:
        for _ in range(steps):
            gradient = gradients[self._step % len(gradients)]
            bucket = Bucket.of({"w": gradient}, state=self._state, step=self._step)
            self._step += 1
            self._comm.barrier()
            before, begin = self._meter.bytes, time.perf_counter()
            self._recipe.reduce(bucket, self._meter)
            if counts:
                self.seconds += time.perf_counter() - begin
                self.bytes += self._meter.bytes - before


def _rows(comm: Comm, trial: Trial, report: Callable[[str], None]) -> list[Row]:
    kernels.warm()
    draw = torch.Generator().manual_seed(comm.rank)
    gradients = [torch.randn(trial.numel, generator=draw) for _ in range(GRADIENTS)]
    running = {name: _Running(recipe, comm) for name, recipe in contenders(trial).items()}
    for one in running.values():
        one.turn(gradients, WARM, counts=False)
    for done in range(0, trial.steps, TURN):
        for name, one in running.items():
            one.turn(gradients, min(TURN, trial.steps - done))
            report(name)
    return [
        Row(name=name, seconds=one.seconds / trial.steps, bytes_sent=one.bytes / trial.steps)
        for name, one in running.items()
    ]


def mpirun(world: int) -> list[str]:
    """The command that starts so many ranks here, more than there are cores if need be."""
    command = ["mpirun", "-n", str(world)]
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True)
    if "Open MPI" in version.stdout:
        command += ["--oversubscribe"]
        command += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return command


def _measure_over_mpi(trial: Trial) -> list[Row]:
    if shutil.which("mpirun") is None:
        raise ValueError("no mpirun on this machine: install OpenMPI, or use --comm gloo")
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "rows.json")  # not stdout: all ranks share mpirun's terminal
        module = [sys.executable, "-m", "thinwire_lab.bench.collectives"]
        done = subprocess.run(
            [*mpirun(trial.world), *module, json.dumps(asdict(trial)), str(answer)],
            capture_output=True, text=True, check=False,
            env={**os.environ, "OMPI_MCA_mpi_yield_when_idle": "1"},
        )  # fmt: skip
        if done.returncode or not answer.exists():
            raise WorkerFailed(f"mpirun ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return [Row(**row) for row in json.loads(answer.read_text())]


def _silent(name: str) -> None:
    """Only rank 0 reports."""


def _main() -> None:
    from thinwire.comm.mpi import MPIComm

    torch.set_num_threads(1)
    comm = MPIComm()
    rows = _rows(comm, Trial(**json.loads(sys.argv[1])), _silent)
    if comm.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    _main()

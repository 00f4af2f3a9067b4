"""Run by mpirun in test_mpi.py: every verb, and recipes of every collective, over MPI."""

from __future__ import annotations

import sys

import torch

from tests.comm.test_pairwise import everything, same
from thinwire import Bucket, recipes
from thinwire.comm import local
from thinwire.comm.mpi import MPIComm

CALLS = (
    "dense()", "half()", "topk(density=0.05)", "sidco(density=0.05)", "gtopk(density=0.05)",
    "gtopk(density=0.05, tree=True)", "topkdsa(density=0.05, wire='bf16+auto')",
    "slots(density=0.05)", "oktopk(density=0.05)", "spardl(density=0.05)",
    "powersgd(rank=2)",
)  # fmt: skip


def steps(call: str, comm: object) -> list[torch.Tensor]:
    recipe, state, means = recipes.parse(call), {}, []
    for step in range(4):
        draw = torch.Generator().manual_seed(100 * step + comm.rank)
        bucket = Bucket.of({"w": torch.randn(40, 30, generator=draw)}, state=state, step=step)
        means.append(recipe.reduce(bucket, comm).mean.clone())
    return means


def main() -> None:
    torch.set_num_threads(1)
    comm = MPIComm()
    assert same(everything(comm), local.run(comm.size, everything)[comm.rank])
    half = comm.all_reduce(torch.full((3,), 1.5, dtype=torch.bfloat16))
    assert half.tolist() == [1.5 * comm.size] * 3
    for call in CALLS:
        here = steps(call, comm)
        there = local.run(comm.size, lambda other, call=call: steps(call, other))[comm.rank]
        for a, b in zip(here, there, strict=True):
            assert torch.allclose(a, b, atol=1e-6), call
            everyone = comm.all_gather(a, [a.numel()] * comm.size)
            assert all(torch.equal(a, other) for other in everyone), call
    if comm.rank == 0:
        sys.stdout.write(f"{len(CALLS)} recipes over {comm.size} MPI ranks\n")


if __name__ == "__main__":
    main()

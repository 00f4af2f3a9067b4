"""DistributedDataParallel with compressed gradients: one line more than plain DDP.

    torchrun --standalone --nproc-per-node 2 examples/ddp.py
    torchrun --standalone --nproc-per-node 2 examples/ddp.py --resume checkpoints

Trains a small network to tell the signs of random projections apart, saves one checkpoint per rank,
and goes on from it with `--resume`. A checkpoint is written whole or not at all, carries a checksum
in its name, and the one before it is kept.
"""

import argparse
import hashlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A different batch on every rank and step; the question is the same for all."""
    teacher = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x, (x @ teacher).argmax(dim=1)


def save(folder: Path, rank: int, step: int, state: dict) -> None:
    """As rank-step-checksum.pt, beside the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    older = checkpoints(folder, rank)
    unfinished = folder / f"{rank}.part"
    torch.save(state, unfinished)
    digest = hashlib.sha256(unfinished.read_bytes()).hexdigest()
    os.replace(unfinished, folder / f"{rank}-{step:08d}-{digest}.pt")
    for path in older[:-1]:
        path.unlink()


def load(folder: Path, rank: int) -> dict:
    """The newest one; residuals differ from rank to rank, so every rank loads its own."""
    found = checkpoints(folder, rank)
    if not found:
        raise SystemExit(f"no checkpoint of rank {rank} in {folder}")
    if hashlib.sha256(found[-1].read_bytes()).hexdigest() not in found[-1].name:
        raise SystemExit(
            f"{found[-1]} is damaged; remove the files of this step, of all ranks, to go on from "
            "the one before"
        )
    return torch.load(found[-1], weights_only=True)


def checkpoints(folder: Path, rank: int) -> list[Path]:
    return sorted(folder.glob(f"{rank}-*.pt"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save", type=Path, default=Path("checkpoints"))
    parser.add_argument("--resume", type=Path, help="folder with the checkpoints to go on from")
    args = parser.parse_args()

    torch.set_num_threads(1)  # several workers share this machine
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)

    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sync = thinwire.attach(model, thinwire.recipes.adtopk(density=0.01), optimizer=optimizer)

    start = 0
    if args.resume:
        saved = load(args.resume, rank)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        sync.load_state_dict(saved["sync"])
        start = saved["step"]

    for step in range(start, start + args.steps):
        x, y = batch(step, rank)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step + 1) % 100 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}")

    if not all(p.isfinite().all() for p in net.parameters()):
        raise SystemExit("the weights are not finite; the checkpoint before stays as it is")
    state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(),
             "sync": sync.state_dict(), "step": start + args.steps}  # fmt: skip
    save(args.save, rank, start + args.steps, state)

    metrics = sync.metrics()
    if rank == 0:
        fewer = metrics["bytes_dense"] / max(1, metrics["bytes_sent"])
        print(f"sent {fewer:.0f} times less than dense, density {metrics['density']:.2%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

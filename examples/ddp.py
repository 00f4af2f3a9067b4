"""DistributedDataParallel with compressed gradients: one line more than plain DDP.

    torchrun --standalone --nproc-per-node 2 examples/ddp.py
    torchrun --standalone --nproc-per-node 2 examples/ddp.py --resume checkpoints

Trains a small network to tell the signs of random projections apart, saves one checkpoint a rank,
and goes on from it with `--resume`.
"""

import argparse
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
        # Residuals differ from rank to rank: every rank loads its own file.
        saved = torch.load(args.resume / f"rank{rank}.pt", weights_only=True)
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

    args.save.mkdir(parents=True, exist_ok=True)
    state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(),
             "sync": sync.state_dict(), "step": start + args.steps}  # fmt: skip
    unfinished = args.save / f"rank{rank}.part"
    torch.save(state, unfinished)
    os.replace(unfinished, args.save / f"rank{rank}.pt")  # never a half-written checkpoint

    metrics = sync.metrics()
    if rank == 0:
        fewer = metrics["bytes_dense"] / max(1, metrics["bytes_sent"])
        print(f"sent {fewer:.0f} times less than dense, density {metrics['density']:.2%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

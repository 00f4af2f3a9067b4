"""Compressed gradients without DDP: any module, any optimizer, Horovod style.

    torchrun --standalone --nproc-per-node 2 examples/optimizer_mode.py

Shows gradient accumulation and clipping: after `backward()` outside `no_sync()` every gradient is
the average over all ranks.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

import thinwire


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A different batch on every rank and step; the question is the same for all."""
    teacher = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x, (x @ teacher).argmax(dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--recipe", default="acpsgd(rank=2)", help="e.g. 'topk(density=0.01)'")
    args = parser.parse_args()

    torch.set_num_threads(1)  # several workers share this machine
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    # Broadcasts rank 0's parameters, so that all ranks start alike.
    recipe = thinwire.recipes.parse(args.recipe)
    sync = thinwire.distribute(optimizer, net.named_parameters(), recipe)

    for step in range(args.steps):
        with sync.no_sync():  # this half of the batch only accumulates
            x, y = batch(2 * step, rank)
            (nn.functional.cross_entropy(net(x), y) / 2).backward()
        x, y = batch(2 * step + 1, rank)
        loss = nn.functional.cross_entropy(net(x), y)
        (loss / 2).backward()

        sync.synchronize()  # gradients are averages from here on
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step + 1) % 100 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}")

    metrics = sync.metrics()
    if rank == 0:
        fewer = metrics["bytes_dense"] / max(1, metrics["bytes_sent"])
        print(f"sent {fewer:.0f} times less than dense")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

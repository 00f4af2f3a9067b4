"""Checkpoints: one folder a step, whole or not there at all, and only plain data in it.

checkpoints/step-00000123/shared.pt   model, optimizer, scaler, counters: rank 0's
checkpoints/step-00000123/rank-2.pt   what each rank keeps for itself: residuals, random numbers
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.lab.workers import Refused

_FOLDER = "checkpoints"


def save(out: Path, step: int, rank: int, shared: dict[str, Any], own: dict[str, Any]) -> None:
    """On all ranks. The folder gets its name when everything is in it; older ones go then."""
    final = out / _FOLDER / f"step-{step:08d}"
    part = out / _FOLDER / f".part-{step:08d}"
    try:
        part.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            torch.save(shared, part / "shared.pt")
        torch.save(own, part / f"rank-{rank}.pt")
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        shutil.rmtree(part, ignore_errors=True)
        raise Refused(f"cannot save a checkpoint in {out}: {error}") from None
    dist.barrier()
    if rank == 0:
        if final.exists():
            shutil.rmtree(final)
        os.replace(part, final)
        for old in steps(out)[:-1]:
            shutil.rmtree(out / _FOLDER / f"step-{old:08d}", ignore_errors=True)
    dist.barrier()


def steps(out: Path) -> list[int]:
    """Steps of which there is a checkpoint, ascending."""
    found = (out / _FOLDER).glob("step-*") if (out / _FOLDER).is_dir() else []
    return sorted(int(path.name.removeprefix("step-")) for path in found)


def load(out: Path, rank: int, world: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The last checkpoint: what is shared, and this rank's own."""
    saved = steps(out)
    if not saved:
        raise Refused(f"{out} has no checkpoint to resume from; start without --resume")
    folder = out / _FOLDER / f"step-{saved[-1]:08d}"
    there = len(list(folder.glob("rank-*.pt")))
    if there != world:
        raise Refused(
            f"{folder} was saved by {there} workers, now there are {world}; resume with as many"
        )
    return _read(folder / "shared.pt"), _read(folder / f"rank-{rank}.pt")


def _read(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a torn or foreign file can raise anything
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Refused(f"{path} cannot be read ({first}); remove its folder") from None
    return state

"""Checkpoints: one folder a step, whole or not there at all, and only plain data in it.

    checkpoints/step-00000123/shared.pt   model, optimizer, scaler, counters: rank 0's
    checkpoints/step-00000123/rank-2.pt   what each rank keeps for itself: residuals, random numbers

All ranks see the same folder.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any, BinaryIO

import torch

from thinwire.jobs.launch import agreed
from thinwire.jobs.logs import CHECKPOINTS
from thinwire.lab.workers import Refused


def save(out: Path, step: int, rank: int, shared: dict[str, Any], own: dict[str, Any]) -> None:
    """On all ranks. The folder gets its name when everything is in it; older ones go then."""
    home = out / CHECKPOINTS
    final, part = _at(out, step), home / f".part-{step:08d}"
    _all_well("make a folder", out, lambda: _fresh(home, part) if rank == 0 else None)
    _all_well("save a checkpoint", out, lambda: _write(part, rank, shared, own), undo=part)
    _all_well("name a checkpoint", out, lambda: _name(out, part, final) if rank == 0 else None)


def steps(out: Path) -> list[int]:
    """Steps of which there is a checkpoint, ascending."""
    try:
        found = list((out / CHECKPOINTS).iterdir()) if (out / CHECKPOINTS).is_dir() else []
    except OSError as error:
        raise Refused(f"cannot read {out / CHECKPOINTS}: {error.strerror}") from None
    names = (re.fullmatch(r"step-(\d{8,})", path.name) for path in found)
    return sorted(int(name[1]) for name in names if name)


def load(out: Path, rank: int, world: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The last checkpoint: what is shared, and this rank's own."""
    saved = steps(out)
    if not saved:
        raise Refused(f"{out} has no checkpoint to resume from; start without --resume")
    folder = _at(out, saved[-1])
    there = len(list(folder.glob("rank-*.pt")))
    if there != world:
        raise Refused(
            f"{folder} was saved by {there} workers, now there are {world}; resume with as many"
        )
    return _read(folder / "shared.pt"), _read(folder / f"rank-{rank}.pt")


def _at(out: Path, step: int) -> Path:
    return out / CHECKPOINTS / f"step-{step:08d}"


def drop(out: Path) -> None:
    """Forget all checkpoints of a run."""
    shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)


def _fresh(home: Path, part: Path) -> None:
    for stale in home.glob(".part-*") if home.is_dir() else ():
        shutil.rmtree(stale)
    part.mkdir(parents=True)


def _write(part: Path, rank: int, shared: dict[str, Any], own: dict[str, Any]) -> None:
    for name, state in (("shared.pt", shared), (f"rank-{rank}.pt", own)):
        if name != "shared.pt" or rank == 0:
            with (part / name).open("wb") as file:
                _put(state, file)
                file.flush()
                os.fsync(file.fileno())


def _put(state: dict[str, Any], file: BinaryIO) -> None:
    """What torch says of a full disk is where its archive ended; the cause says more."""
    try:
        torch.save(state, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _name(out: Path, part: Path, final: Path) -> None:
    os.replace(part, final)
    folder = os.open(final.parent, os.O_RDONLY)
    os.fsync(folder)  # the new name is on disk before the old ones go
    os.close(folder)
    for step in steps(out):
        if _at(out, step) != final:
            shutil.rmtree(_at(out, step))


def _all_well(what: str, out: Path, work: Any, undo: Path | None = None) -> None:
    """Do it; if it failed on any rank, all raise."""

    def tried() -> None:
        try:
            work()
        except (OSError, RuntimeError) as error:
            said = getattr(error, "strerror", None) or str(error).partition("\n")[0]
            problem = said or type(error).__name__
            raise Refused(f"cannot {what} in {out}: {problem}") from None

    try:
        agreed(tried)
    except Refused:
        if undo is not None:
            shutil.rmtree(undo, ignore_errors=True)
        raise


def _read(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a torn or foreign file can raise anything
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Refused(f"{path} cannot be read ({first}); remove its folder") from None
    return state

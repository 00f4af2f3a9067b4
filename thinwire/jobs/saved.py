"""Checkpoints: one folder a step, whole or not there at all, and only plain data in it.

    checkpoints/step-00000123/shared.pt   model, optimizer, scaler, counters: rank 0's
    checkpoints/step-00000123/rank-2.pt   what each rank keeps for itself: residuals, random numbers
    checkpoints/step-00000123/rank-2.pt.sha256   as sha256sum writes it; every file has its own

The last two steps are kept: should a file of the last be damaged, the run goes on from the one
before. All ranks see the same folder.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.jobs.launch import agreed, gathered
from thinwire.jobs.logs import CHECKPOINTS
from thinwire.lab.workers import Refused

log = logging.getLogger(__name__)

KEPT = 2  # steps of which there is a checkpoint
CHUNK = 2**20


def save(out: Path, step: int, rank: int, shared: dict[str, Any], own: dict[str, Any]) -> None:
    """On all ranks. The folder gets its name when everything is in it; older ones go then.

    What is not finite on some rank is not saved: it would replace what is.
    """
    if not bool(gathered(torch.tensor([[int(_finite(shared) and _finite(own))]])).all()):
        if rank == 0:
            log.warning("not saved: after step %d not every value is finite", step)
        return
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


def resume(out: Path, rank: int, world: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """On all ranks: the last checkpoint that all of them can read. Damaged ones are set aside."""
    agreed(lambda: _complete(out, world))
    problem = None
    for step in _seen_by_all(out, world)[::-1]:
        read: list[dict[str, Any]] = []
        try:
            agreed(partial(_load_into, read, out, rank, world, step))
        except Refused as refused:
            problem = problem or refused
            continue
        if problem is not None:
            agreed(partial(_set_aside, out, step) if rank == 0 else _nothing)
            if rank == 0:
                log.warning("%s; going on from step %d", problem, step)
        return read[0], read[1]
    raise Refused(f"{problem or out}; there is no other checkpoint to go on from: begin anew")


def load(
    out: Path, rank: int, world: int, step: int | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The checkpoint of this step, or the last: what is shared, and this rank's own."""
    if step is None:
        _complete(out, world)
        step = steps(out)[-1]
    folder = _at(out, step)
    return _read(folder / "shared.pt"), _read(folder / f"rank-{rank}.pt")


def _load_into(read: list[dict[str, Any]], out: Path, rank: int, world: int, step: int) -> None:
    read.extend(load(out, rank, world, step))


def _seen_by_all(out: Path, world: int) -> list[int]:
    """Disks of other machines may be behind."""
    mine = torch.tensor(steps(out), dtype=torch.int64).reshape(-1, 1)
    seen = gathered(mine).flatten().tolist()
    return sorted(step for step in set(seen) if seen.count(step) == world)


def _nothing() -> None:
    """What other ranks do meanwhile."""


def _complete(out: Path, world: int) -> None:
    """Whether there is a checkpoint of so many workers; in a damaged one files may be missing."""
    counts = {step: len(list(_at(out, step).glob("rank-*.pt"))) for step in steps(out)}
    if not counts:
        raise Refused(f"{out} has no checkpoint to resume from; start without --resume")
    if world not in counts.values():
        last, there = max(counts.items())
        raise Refused(
            f"{_at(out, last)} was saved by {there} workers, now there are {world}; resume with as "
            "many"
        )


def _set_aside(out: Path, good: int) -> None:
    """What is later than the good one is no checkpoint any more, but not ours to destroy."""
    try:
        for step in steps(out):
            if step > good:
                bad = _at(out, step)
                aside = bad.with_name(f"damaged-{bad.name}")
                shutil.rmtree(aside, ignore_errors=True)
                os.replace(bad, aside)
    except OSError as error:
        raise Refused(f"cannot set a damaged checkpoint in {out} aside: {error.strerror}") from None


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
                summed = _Summed(file)
                _put(state, summed)
                os.fsync(file.fileno())
            with _sum_of(part / name).open("w") as beside:
                beside.write(f"{summed.sum.hexdigest()}  {name}\n")
                beside.flush()
                os.fsync(beside.fileno())


class _Summed:
    """A file to write to, and the checksum of what should be in it then."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.sum = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.sum.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _sum_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _finite(thing: Any) -> bool:
    if isinstance(thing, Mapping):
        return all(map(_finite, thing.values()))
    if isinstance(thing, list | tuple):
        return all(map(_finite, thing))
    if isinstance(thing, Tensor) and thing.is_floating_point():
        return kernels.finite(thing.detach().reshape(-1))
    return True


def _put(state: dict[str, Any], file: _Summed) -> None:
    """What torch says of a full disk is where its archive ended; the cause says more."""
    try:
        torch.save(state, file)  # type: ignore[arg-type]  # it only writes
        file.flush()
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _name(out: Path, part: Path, final: Path) -> None:
    os.replace(part, final)
    folder = os.open(final.parent, os.O_RDONLY)
    os.fsync(folder)  # the new name is on disk before the old ones go
    os.close(folder)
    known = steps(out)
    here = next(i for i, step in enumerate(known) if _at(out, step) == final)
    for step in (*known[: max(0, here + 1 - KEPT)], *known[here + 1 :]):
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
        _checked(path)
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a torn or foreign file can raise anything
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Refused(f"{path} cannot be read ({first})") from None
    return state


def _checked(path: Path) -> None:
    made = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            made.update(chunk)
    beside = _sum_of(path)
    if beside.read_text().split()[:1] != [made.hexdigest()]:
        raise ValueError(f"it is damaged: its checksum is not that of {beside.name}")

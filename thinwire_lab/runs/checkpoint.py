"""Checkpoints: one folder per step, whole or not there at all, and only plain data in it.

    checkpoints/step-00000123/shared.pt   rank 0's: model, optimizer, scaler, counters
    checkpoints/step-00000123/rank-2.pt   each rank's own: residuals, random numbers
    checkpoints/step-00000123/rank-2.pt.sha256   as sha256sum writes it; every file has its own

The last two steps are kept. If a file of the last is damaged, the run goes on from the one before.
All ranks see the same folder.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire_lab.errors import Refused, first_line
from thinwire_lab.files import explain_errors
from thinwire_lab.runs.launch import agree, agree_on_first, gather
from thinwire_lab.runs.logs import CHECKPOINTS

log = logging.getLogger(__name__)

KEPT = 2  # steps that have a checkpoint
State = dict[str, Any]


def save(out: Path, step: int, rank: int, shared: State, own: State) -> None:
    """Save on all ranks. The folder gets its name when it is complete; older ones go then.

    A state with a value that is not finite on some rank is not saved: it would replace a good one.
    """
    if not all(gather(_is_finite([shared, own]))):
        if rank == 0:
            log.warning("not saved: after step %d not every value is finite", step)
        return
    part = out / CHECKPOINTS / f".part-{step:08d}"
    try:
        agree_on_first(partial(_attempt, "make a folder", out, lambda: _make_empty(part)))
        agree(partial(_attempt, "save a checkpoint", out, lambda: _write(part, rank, shared, own)))
        agree_on_first(partial(_attempt, "name a checkpoint", out, lambda: _name(out, part, step)))
    except Refused:
        shutil.rmtree(part, ignore_errors=True)
        raise


def list_steps(out: Path) -> list[int]:
    """Steps that have a checkpoint, ascending."""
    home = out / CHECKPOINTS
    with explain_errors(f"read {home}"):
        found = list(home.iterdir()) if home.is_dir() else []
    names = (re.fullmatch(r"step-(\d{8,})", path.name) for path in found)
    return sorted(int(name[1]) for name in names if name)


def resume(out: Path, rank: int, world: int) -> tuple[State, State]:
    """Load, on all ranks, the last checkpoint that all can read. Damaged ones are set aside."""
    agree(partial(check_world, out, world))
    problem = None
    for step in _find_common_steps(out)[::-1]:
        try:
            found = agree(partial(load, out, rank, step))
        except Refused as refused:
            problem = problem or refused
            continue
        if problem is not None:
            agree_on_first(partial(_set_aside, out, step))
            if rank == 0:
                log.warning("%s; going on from step %d", problem, step)
        return found
    raise Refused(f"{problem or out}; there is no other checkpoint to go on from: begin anew")


def load(out: Path, rank: int, step: int) -> tuple[State, State]:
    """The checkpoint of this step: what is shared, and this rank's own."""
    folder = _path_of(out, step)
    return _read(folder / "shared.pt"), _read(folder / f"rank-{rank}.pt")


def check_world(out: Path, world: int) -> None:
    """Refuse if no checkpoint is of so many workers; a damaged one may lack files."""
    counts = {step: len(list(_path_of(out, step).glob("rank-*.pt"))) for step in list_steps(out)}
    if not counts:
        raise Refused(f"{out} has no checkpoint to resume from; start without --resume")
    if world not in counts.values():
        last, there = max(counts.items())
        raise Refused(
            f"{_path_of(out, last)} was saved by {there} workers, now there are {world}; resume "
            "with as many"
        )


def drop(out: Path) -> None:
    """Remove all checkpoints of a run."""
    shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)


def _find_common_steps(out: Path) -> list[int]:
    """Steps that all ranks see: disks of other machines may be behind."""
    return sorted(set.intersection(*(set(steps) for steps in gather(list_steps(out)))))


def _set_aside(out: Path, good: int) -> None:
    """Checkpoints later than the good one are none any more, but not ours to destroy."""
    with explain_errors(f"set a damaged checkpoint in {out} aside"):
        for step in list_steps(out):
            if step > good:
                bad = _path_of(out, step)
                aside = bad.with_name(f"damaged-{bad.name}")
                shutil.rmtree(aside, ignore_errors=True)
                os.replace(bad, aside)


def _path_of(out: Path, step: int) -> Path:
    return out / CHECKPOINTS / f"step-{step:08d}"


def _sum_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _make_empty(part: Path) -> None:
    for stale in part.parent.glob(".part-*"):
        shutil.rmtree(stale)
    part.mkdir(parents=True)


def _write(part: Path, rank: int, shared: State, own: State) -> None:
    if rank == 0:
        _write_state(part / "shared.pt", shared)
    _write_state(part / f"rank-{rank}.pt", own)


def _write_state(path: Path, state: State) -> None:
    with path.open("w+b") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # of a full disk torch says less than the cause does
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    with _sum_path(path).open("w") as beside:
        beside.write(f"{digest}  {path.name}\n")
        beside.flush()
        os.fsync(beside.fileno())


def _is_finite(thing: Any) -> bool:
    if isinstance(thing, Mapping):
        return all(map(_is_finite, thing.values()))
    if isinstance(thing, list | tuple):
        return all(map(_is_finite, thing))
    if isinstance(thing, Tensor) and thing.is_floating_point():
        return kernels.finite(thing.detach().reshape(-1))
    return True


def _name(out: Path, part: Path, step: int) -> None:
    os.replace(part, _path_of(out, step))
    folder = os.open(part.parent, os.O_RDONLY)
    os.fsync(folder)  # the new name is on disk before the old ones go
    os.close(folder)
    earlier = [other for other in list_steps(out) if other < step]
    later = [other for other in list_steps(out) if other > step]
    for other in (*earlier[: max(0, len(earlier) + 1 - KEPT)], *later):
        shutil.rmtree(_path_of(out, other))


def _attempt(what: str, out: Path, work: Callable[[], None]) -> None:
    try:
        work()
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise Refused(f"cannot {what} in {out}: {reason}") from None


def _read(path: Path) -> State:
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if _sum_path(path).read_text().split()[:1] != [found]:
            raise ValueError(f"it is damaged: its checksum is not that of {_sum_path(path).name}")
        state: State = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a torn or foreign file can raise anything
        raise Refused(f"{path} cannot be read ({first_line(error)})") from None
    return state

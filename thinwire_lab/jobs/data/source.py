"""What data is to the loop, how files are found and checked, and who gets which examples."""

from __future__ import annotations

import hashlib
import importlib
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from thinwire_lab.errors import Refused

Batch = tuple[Tensor, ...]


class MissingData(Refused):
    """A data set that is not there, or not whole; the message shows the layout expected."""


class Data(Protocol):
    """Examples; `draw` is given where they may be changed at random, as in training."""

    def __len__(self) -> int: ...

    def batch(self, chosen: Tensor, draw: torch.Generator | None) -> Batch: ...


@dataclass(frozen=True)
class Pick:
    """Which examples make a batch, and the seed of what happens to them."""

    chosen: Tensor
    seed: int | None


class Shards(Sampler[Pick]):
    """This rank's share of every epoch's shuffle, from any step on: the same after a resume."""

    def __init__(self, size: int, batch: int, rank: int, world: int, seed: int, first: int) -> None:
        self._each = size // (batch * world)
        if self._each == 0:
            raise Refused(
                f"{size} examples are fewer than one batch of {batch} on each of {world} workers; "
                "use a smaller --batch or fewer workers"
            )
        self._size, self._batch, self._rank, self._world = size, batch, rank, world
        self._seed, self._first = seed, first

    def __iter__(self) -> Iterator[Pick]:
        """Without end."""
        step = self._first
        while True:
            epoch = step // self._each
            order = torch.randperm(self._size, generator=make_generator(self._seed, epoch))
            for place in range(step % self._each, self._each):
                start = (place * self._world + self._rank) * self._batch
                seed = hash((self._seed, step, self._rank)) & 0x7FFFFFFF
                yield Pick(order[start : start + self._batch], seed)
                step += 1


def make_generator(*numbers: int) -> torch.Generator:
    """A generator of its own for these numbers; hashes of whole numbers are the same everywhere."""
    return torch.Generator().manual_seed(hash(numbers) & 0x7FFFFFFFFFFF)


class _PickedDataset(Dataset[Batch]):
    def __init__(self, data: Data) -> None:
        self._data = data

    def __getitem__(self, pick: Pick) -> Batch:
        draw = None if pick.seed is None else torch.Generator().manual_seed(pick.seed)
        return self._data.batch(pick.chosen, draw)


def batches(data: Data, picks: Sampler[Pick] | list[Pick], loaders: int = 0) -> Iterator[Batch]:
    """The batches picked; `loaders` processes read ahead."""
    own = torch.Generator()  # it would draw from the global one, which dropout needs on a resume
    try:
        yield from DataLoader(
            _PickedDataset(data), sampler=picks, batch_size=None, num_workers=loaders,
            generator=own, worker_init_fn=_ignore_signals,
        )  # fmt: skip
    except MissingData as error:  # of another process: its traceback, and last what it said
        name = f"{MissingData.__module__}.{MissingData.__qualname__}: "
        raise MissingData(str(error).strip().rpartition(name)[2]) from None


def _ignore_signals(number: int) -> None:
    """What ends a training may come to the whole group, and its last step wants its batch: a loader
    ends when its parent tells it to, and then at once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # macOS cannot tell who has sent a signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_told, args=(os.getppid(),), daemon=True).start()


def _end_when_told(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(128 + signal.SIGTERM)


def pick_in_order(size: int, batch: int, rank: int, world: int) -> list[Pick]:
    """Every example once, unchanged: this rank's batches of all."""
    parts = torch.arange(size).split(batch)
    return [Pick(part, None) for part in parts[rank::world]]


def load_library(library: str) -> Any:
    """A library that not all jobs need; loaded when first needed, which takes a while."""
    try:
        return importlib.import_module(library)
    except ImportError:
        raise Refused(f"this job needs {library}: pip install 'thinwire[jobs]'") from None


def require_files(folder: Path, names: tuple[str, ...], layout: str) -> list[Path]:
    """These files of the folder, or an error that shows what it should look like."""
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise MissingData(f"{folder} has no {', '.join(missing)}; expected {layout}")
    return [folder / name for name in names]


@contextmanager
def refuse_damaged(complaint: str, *kinds: type[Exception]) -> Iterator[None]:
    """Such errors inside become a refusal: the complaint, what the error says, what to do."""
    try:
        yield
    except kinds as error:
        raise MissingData(f"{complaint} ({error}); get it anew") from None


def read_bytes(path: Path) -> bytes:
    """All of a file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise MissingData(f"cannot read {path}: {error.strerror}") from None


def read_published(path: Path, md5: str) -> bytes:
    """The file's bytes, if they are the ones published."""
    data = read_bytes(path)
    found = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if found != md5:
        raise MissingData(f"{path} is damaged: its MD5 is {found}, published is {md5}; get it anew")
    return data


class _PlainUnpickler(pickle.Unpickler):
    """Lists, dicts, strings, numbers and NumPy arrays; nothing that could run."""

    _ALLOWED = frozenset({
        ("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode"),
    })  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a data set")
        return super().find_class(module, name)


def unpickle(data: bytes, where: str) -> Any:
    """A pickle of plain data; any other is refused before it can do anything."""
    with refuse_damaged(f"{where} is not the data it should be", Exception):  # it can raise any
        return _PlainUnpickler(BytesIO(data), encoding="bytes").load()

"""Pictures: CIFAR archives, MNIST files, folders of JPEGs, one .npz, and scikit-learn's digits."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire_lab.jobs.data.source import (
    Batch,
    Data,
    MissingData,
    load_library,
    read_published,
    refuse_damaged,
    require_files,
    unpickle,
)

CIFAR = {  # archive: MD5 as published, classes, folder inside, training files, test files, labels
    "cifar-10-python.tar.gz": (
        "c58f30108f718f92721af3b95e74349a", "cifar-10-batches-py",
        tuple(f"data_batch_{i}" for i in range(1, 6)), ("test_batch",), b"labels",
    ),
    "cifar-100-python.tar.gz": (
        "eb9058c3a382ffc7106e4002c42a8d85", "cifar-100-python", ("train",), ("test",),
        b"fine_labels",
    ),
}  # fmt: skip
MNIST = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
NPZ_NAMES = ("train_images", "test_images", "train_labels", "test_labels")
KINDS = 10  # of pictures in a sample
NPZ_LAYOUT = f"{', '.join(NPZ_NAMES)}: uint8 pictures (n, 32, 32, 3) and their labels, 0 to 9"


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Pictures in memory as bytes; with `crop` training ones are shifted and mirrored."""

    pixels: Tensor  # (n, c, h, w) uint8
    labels: Tensor  # (n,) int64
    mean: Tensor  # (c, 1, 1)
    deviation: Tensor
    crop: int = 0  # pixels of margin in which a picture may move

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, chosen: Tensor, draw: torch.Generator | None) -> Batch:
        pixels = self.pixels[chosen]
        if draw is not None and self.crop:
            pixels = _shift(pixels, self.crop, draw)
        return (pixels.float() / 255 - self.mean) / self.deviation, self.labels[chosen]


def digits(side: int, channels: int, crop: int = 0) -> tuple[Pictures, Pictures]:
    """scikit-learn's 1,797 handwritten digits, enlarged; three in ten are for the test."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    small = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) * (255 / 16)
    large = torch.nn.functional.interpolate(small, size=(side, side), mode="bilinear")
    pixels = large.round().to(torch.uint8).expand(-1, channels, -1, -1).contiguous()
    train, test, train_labels, test_labels = train_test_split(
        pixels, torch.tensor(labels), test_size=0.3, random_state=0, stratify=labels
    )
    return _split(train, test, train_labels, test_labels, crop=crop)


def cifar(folder: Path, classes: int) -> tuple[Pictures, Pictures]:
    """CIFAR-10 or -100 from its published archive, or an .npz sample of it."""
    if folder.suffix == ".npz":
        return _npz(folder)
    name = f"cifar-{classes}-python.tar.gz"
    (path,) = require_files(folder, (name,), f"the archive {name}, as its authors publish it")
    md5, inside, train, test, key = CIFAR[name]
    data = read_published(path, md5)
    arrays: list[Tensor] = []
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for files in (train, test):
            parts = [unpickle(_member(archive, f"{inside}/{f}"), f"{path}: {f}") for f in files]
            pixels = np.concatenate([part[b"data"] for part in parts]).reshape(-1, 3, 32, 32)
            labels = [label for part in parts for label in part[key]]
            arrays += [torch.from_numpy(pixels), torch.tensor(labels)]
    return _split(arrays[0], arrays[2], arrays[1], arrays[3], crop=4)


def mnist(folder: Path) -> tuple[Pictures, Pictures]:
    """The four files of MNIST, gzipped."""
    paths = require_files(folder, tuple(MNIST), "MNIST's four .gz files, as published")
    train, labels, test, test_labels = (
        _idx(read_published(path, MNIST[path.name]), path) for path in paths
    )
    return _split(train[:, None], test[:, None], labels.long(), test_labels.long())


def image_folders(folder: Path, side: int) -> tuple[Data, Data]:
    """ImageNet's layout: train/<class>/*.JPEG and val/<class>/*.JPEG."""
    known = kinds(folder / "train")
    strange = set(kinds(folder / "val")) - set(known)
    if strange:
        raise MissingData(f"{folder / 'val'} has kinds that train/ lacks: {', '.join(strange)}")
    parts = []
    for name in ("train", "val"):
        files = [
            (path, label)
            for label, kind in enumerate(known)
            if (folder / name / kind).is_dir()
            for path in _list_entries(folder / name / kind)
            if path.suffix.lower() in (".jpeg", ".jpg", ".png")
        ]
        if not files:
            raise MissingData(
                f"{folder / name} has no pictures; expected train/<class>/*.JPEG and "
                "val/<class>/*.JPEG"
            )
        empty = set(range(len(known))) - {label for _, label in files} if name == "train" else set()
        if empty:
            at = folder / name / known[min(empty)]
            raise MissingData(f"{at} has no pictures; every folder of train/ is a class: remove it")
        parts.append(Folder(tuple(p for p, _ in files), torch.tensor([y for _, y in files]), side))
    return parts[0], parts[1]


def kinds(root: Path) -> list[str]:
    """The classes: every folder but hidden ones, which tools leave behind."""
    there = _list_entries(root) if root.is_dir() else []
    return [path.name for path in there if path.is_dir() and not path.name.startswith(".")]


def _list_entries(root: Path) -> list[Path]:
    try:
        return sorted(root.iterdir())
    except OSError as error:
        raise MissingData(f"cannot read {root}: {error.strerror}") from None


@dataclass(frozen=True)
class Folder:
    """Pictures on disk, decoded when asked for: cut at random in training, else from the middle."""

    paths: tuple[Path, ...]
    labels: Tensor
    side: int

    def __len__(self) -> int:
        return len(self.paths)

    def batch(self, chosen: Tensor, draw: torch.Generator | None) -> Batch:
        mean, deviation = (torch.tensor(v).view(3, 1, 1) for v in IMAGENET)
        pixels = torch.stack([self._decode(self.paths[i], draw) for i in chosen.tolist()])
        return (pixels.float() / 255 - mean) / deviation, self.labels[chosen]

    def _decode(self, path: Path, draw: torch.Generator | None) -> Tensor:
        images = load_library("PIL.Image")
        damaged = refuse_damaged(f"{path} is no picture", Exception)  # every format has its own
        with damaged, images.open(path) as opened:
            image = opened.convert("RGB")
        size = (self.side, self.side)
        image = image.resize(size, box=_box(image.size, draw))
        if draw is not None and bool(torch.rand(1, generator=draw) < 0.5):
            image = image.transpose(images.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _box(size: tuple[int, int], draw: torch.Generator | None) -> tuple[float, float, float, float]:
    """The part of a picture to show: 8 to 100 % of it at random, or the middle 7/8 square."""
    width, height = size
    if draw is None:
        side = 0.875 * min(size)
        left, top = (width - side) / 2, (height - side) / 2
        return left, top, left + side, top + side
    share, form, x, y = torch.rand(4, generator=draw).tolist()
    area = (0.08 + 0.92 * share) * width * height
    ratio = (3 / 4) ** (1 - 2 * form)
    wide, high = min(width, (area * ratio) ** 0.5), min(height, (area / ratio) ** 0.5)
    left, top = x * (width - wide), y * (height - high)
    return left, top, left + wide, top + high


def _split(
    train: Tensor, test: Tensor, train_labels: Tensor, test_labels: Tensor, crop: int = 0
) -> tuple[Pictures, Pictures]:
    """Both standardised by the training pictures; only those move."""
    deviation, mean = torch.std_mean(train.float() / 255, dim=(0, 2, 3))
    first = Pictures(
        pixels=train, labels=train_labels, mean=mean.view(-1, 1, 1),
        deviation=deviation.view(-1, 1, 1), crop=crop,
    )  # fmt: skip
    return first, replace(first, pixels=test, labels=test_labels, crop=0)


def _npz(path: Path) -> tuple[Pictures, Pictures]:
    """Both parts of a sample kept as plain arrays."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, TypeError, AttributeError, zipfile.BadZipFile,
            zlib.error) as error:  # fmt: skip
        raise MissingData(f"{path} cannot be read ({error}); expected {NPZ_LAYOUT}") from None
    if not set(NPZ_NAMES) <= set(found):
        raise MissingData(f"{path} holds {', '.join(found)}; expected {NPZ_LAYOUT}")
    for name in ("train", "test"):
        _check_npz(found[f"{name}_images"], found[f"{name}_labels"], f"{path}: {name}")
    train, test, labels, test_labels = (torch.from_numpy(found[name]) for name in NPZ_NAMES)
    if train.shape[1:] != test.shape[1:]:
        raise MissingData(
            f"{path}: train_images are {tuple(train.shape[1:])}, test_images "
            f"{tuple(test.shape[1:])}; make them alike"
        )
    if train.shape[-1] == 3:  # colours last
        train, test = (part.permute(0, 3, 1, 2).contiguous() for part in (train, test))
    return _split(train, test, labels.long(), test_labels.long(), crop=4)


def _check_npz(pixels: Any, labels: Any, where: str) -> None:
    if pixels.dtype != np.uint8 or pixels.shape[1:] not in ((32, 32, 3), (3, 32, 32)):
        raise MissingData(f"{where}_images is {pixels.dtype} {pixels.shape}; expected {NPZ_LAYOUT}")
    if labels.dtype.kind not in "iu" or labels.shape != pixels.shape[:1]:
        raise MissingData(
            f"{where}_labels is {labels.dtype} {labels.shape} for {len(pixels)} pictures; "
            f"expected {NPZ_LAYOUT}"
        )
    if len(labels) == 0 or not 0 <= labels.min() <= labels.max() < KINDS:
        raise MissingData(f"{where}_labels are not 0 to {KINDS - 1}; expected {NPZ_LAYOUT}")


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    try:
        file = archive.extractfile(name)
    except KeyError:
        file = None
    if file is None:
        raise MissingData(f"the archive has no {name}; get it anew")
    return file.read()


def _idx(data: bytes, path: Path) -> Tensor:
    """An IDX file: two zeros, a type, the number of dimensions, their sizes, bytes."""
    known = (OSError, EOFError, ValueError, IndexError, zlib.error)
    with refuse_damaged(f"{path} is no IDX file", *known):
        raw = gzip.decompress(data)
        dimensions = raw[3]
        sizes = np.frombuffer(raw, ">i4", dimensions, 4)
        body: Any = np.frombuffer(raw, np.uint8, int(np.prod(sizes)), 4 + 4 * dimensions)
    return torch.from_numpy(body.reshape(sizes.tolist()).copy())


def _shift(pixels: Tensor, margin: int, draw: torch.Generator) -> Tensor:
    """Every picture shifted by up to `margin` pixels each way, and half of them mirrored."""
    n, _, h, w = pixels.shape
    padded = torch.nn.functional.pad(pixels, (margin,) * 4)
    down, right = torch.randint(0, 2 * margin + 1, (2, n), generator=draw)
    rows = (down[:, None] + torch.arange(h))[:, None, :, None]
    columns = right[:, None] + torch.arange(w)
    mirrored = torch.rand(n, generator=draw) < 0.5
    columns = torch.where(mirrored[:, None], columns.flip(1), columns)[:, None, None, :]
    every = torch.arange(n)[:, None, None, None]
    channels = torch.arange(pixels.shape[1])[None, :, None, None]
    return padded[every, channels, rows, columns]

"""Jobs that tell what is in a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire_lab.jobs.data import images
from thinwire_lab.jobs.data.fake import fake
from thinwire_lab.jobs.data.source import Batch, Data, MissingData
from thinwire_lab.jobs.job import Job, Settings, Source, Task, quick
from thinwire_lab.jobs.networks import hub, vision

LAYOUT = (
    "cifar-10-python.tar.gz or cifar-100-python.tar.gz, an .npz sample of CIFAR-10, or ImageNet's "
    "train/<class>/ and val/<class>/"
)
MNIST = "MNIST's four .gz files"
DIGITS = "scikit-learn digits"
# size: blocks of every stage, their widths, and the width before the first
RESNET50 = {"tiny": ((1, 1, 1, 1), (32, 64, 64, 128), 16),
            "small": ((3, 4, 6, 3), (64, 128, 256, 512), 32),
            "paper": ((3, 4, 6, 3), (256, 512, 1024, 2048), 64)}  # fmt: skip
RESNET152 = {"tiny": ((1, 2, 2, 1), (32, 64, 64, 128), 16),
             "small": ((3, 8, 36, 3), (64, 128, 256, 512), 32),
             "paper": ((3, 8, 36, 3), (256, 512, 1024, 2048), 64)}  # fmt: skip
Stages = tuple[int, int, int, int]


def mlp(size: str, source: Source) -> Task:
    width, hidden = {"tiny": (256, 2), "small": (1024, 2), "paper": (1024, 8)}[size]
    inputs = 64 if source.data is None else 784
    data = _load_grey(size, source, 8)
    return make_classifier(lambda: vision.mlp(inputs, width, hidden), data)


def mnist(size: str, source: Source) -> Task:
    return make_classifier(vision.mnist_cnn, _load_grey(size, source, 28))


def resnet20(size: str, source: Source) -> Task:
    data, classes, _ = _load_coloured(size, source, 32)
    width, blocks = (8, 1) if size == "tiny" else (16, 3)
    return make_classifier(lambda: vision.resnet20(classes, width, blocks), data)


def vgg16(size: str, source: Source) -> Task:
    data, classes, _ = _load_coloured(size, source, 32)
    width = 0.125 if size == "tiny" else 1.0
    return make_classifier(lambda: vision.vgg16(classes, width), data)


def resnet(shapes: Mapping[str, tuple[Stages, Stages, int]], size: str, source: Source) -> Task:
    data, classes, _ = _load_coloured(size, source, 224)
    depths, widths, stem = shapes[size]
    start = source.checkpoint
    return make_classifier(lambda: hub.resnet(depths, widths, classes, stem, start), data)


def vit(size: str, source: Source) -> Task:
    # with patches of 4 and 8 pixels, as the smaller sizes have, 224 would be thousands of words
    data, classes, side = _load_coloured(size, source, 224 if size == "paper" else 32)
    width, layers, heads, patch = {
        "tiny": (64, 2, 2, 8), "small": (192, 6, 3, 4), "paper": (1024, 24, 16, 16),
    }[size]  # fmt: skip
    start = source.checkpoint
    return make_classifier(lambda: hub.vit(width, layers, heads, side, patch, classes, start), data)


def make_classifier(net: Callable[[], nn.Module], data: tuple[Data, Data]) -> Task:
    """Cross-entropy, and the share that is right."""
    return Task(net=net, train=data[0], test=data[1], loss=_loss, rows=_rows, figures=_figures)


def _scores(net: nn.Module, pictures: Tensor) -> Tensor:
    out = net(pictures)
    scores: Tensor = out if isinstance(out, Tensor) else out.logits
    return scores


def _loss(net: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(_scores(net, batch[0]), batch[1])


def _rows(net: nn.Module, batches: Iterable[Batch]) -> Tensor:
    rows = []
    for pictures, labels in batches:
        scores = _scores(net, pictures)
        right = float((scores.argmax(dim=1) == labels).sum())
        rows.append([right, float(F.cross_entropy(scores, labels, reduction="sum")), len(labels)])
    return torch.tensor(rows, dtype=torch.float64).view(-1, 3)


def _figures(rows: Tensor) -> dict[str, float]:
    right, loss, count = rows.sum(dim=0).tolist()
    return {"accuracy": right / max(count, 1), "test_loss": loss / max(count, 1)}


def _load_grey(size: str, source: Source, side: int) -> tuple[Data, Data]:
    """MNIST, or digits of this side that come with scikit-learn."""
    if source.fake:
        return fake((((1, 28, 28), 0), ((), 10)))
    folder = source.folder(size, MNIST)
    return images.digits(side, 1) if folder is None else images.mnist(folder)


def _load_coloured(size: str, source: Source, large: int) -> tuple[tuple[Data, Data], int, int]:
    """Pictures in three colours, how many kinds there are, and their side."""
    if source.fake:
        side, classes = (large, 1000 if large > 32 else 10) if size == "paper" else (32, 10)
        return fake((((3, side, side), 0), ((), classes)), rows=32), classes, side
    folder = source.folder(size, LAYOUT)
    if folder is None:
        return images.digits(32, 3), 10, 32
    if folder.suffix == ".npz":
        return images.cifar(folder, 10), 10, 32
    named = folder.name in images.CIFAR  # the archive itself
    there = [name for name in images.CIFAR if (folder / name).is_file()]
    if named or there:
        if len(there) > 1:
            raise MissingData(f"{folder} has {' and '.join(there)}; give the path of one of them")
        classes = 100 if "cifar-100" in (folder.name if named else there[0]) else 10
        return images.cifar(folder.parent if named else folder, classes), classes, 32
    if not (folder / "train").is_dir():
        raise MissingData(
            f"{folder} has neither train/ nor one of {', '.join(images.CIFAR)}; expected {LAYOUT}"
        )
    return images.image_folders(folder, large), len(images.kinds(folder / "train")), large


_STUDY = Settings(batch=32, rate=0.1, epochs=12, warmup=2, weight_decay=1e-4)
_SOON = Settings(  # dense has 45 % with a rate of 0.02, 61 % with this one (docs/results.md)
    batch=32, rate=0.008, epochs=4, warmup=0.5, weight_decay=5e-4
)  # fmt: skip
_DESK = Settings(batch=32, rate=0.05, epochs=10, warmup=1)
_OKTOPK = Settings(
    batch=16, rate=0.1, epochs=161, warmup=10, weight_decay=1e-4,
    schedule="milestones", milestones=(81, 122, 155),
)  # fmt: skip
_GTOPK = replace(_OKTOPK, batch=32, epochs=141, milestones=(81, 122))
_ADTOPK = Settings(
    batch=32, rate=0.0125, rate_by_workers=True, epochs=80, warmup=5, weight_decay=5e-5,
    schedule="milestones", milestones=(30, 60), loaders=4,
)  # fmt: skip
_VIT = Settings(batch=32, rate=5e-5, epochs=80, optimizer="adamw", schedule="linear", loaders=4)

JOBS = {
    "mlp": Job(
        about="two hidden layers on digits or MNIST", embedded=DIGITS, make=mlp,
        sizes={"tiny": quick(16, 0.1, 60), "small": Settings(batch=32, rate=0.1, epochs=10),
               "paper": Settings(batch=64, rate=0.1, epochs=20)},
    ),
    "mnist": Job(
        about="PyTorch's MNIST example", embedded=DIGITS, make=mnist,
        sizes={"tiny": quick(16, 0.05, 30), "small": Settings(batch=32, rate=0.05, epochs=5),
               "paper": Settings(batch=64, rate=0.05, epochs=14)},
    ),
    "resnet20": Job(
        about="ResNet-20, CIFAR-10 (gTop-k)", embedded=DIGITS, make=resnet20,
        sizes={"tiny": quick(16, 0.1, 40), "small": _STUDY, "paper": _GTOPK},
    ),
    "resnet50": Job(
        about="ResNet-50, CIFAR-100 or ImageNet (ADTopk, ACP-SGD)", embedded=DIGITS,
        make=partial(resnet, RESNET50),
        sizes={"tiny": quick(16, 0.05, 40), "small": _DESK, "paper": _ADTOPK},
    ),
    "resnet152": Job(
        about="ResNet-152, ImageNet (ADTopk, ACP-SGD)", embedded=DIGITS,
        make=partial(resnet, RESNET152),
        sizes={"tiny": quick(16, 0.05, 40), "small": _DESK, "paper": _ADTOPK},
    ),
    "vgg16": Job(
        about="VGG-16, CIFAR-10 (Ok-Topk)", embedded=DIGITS, make=vgg16,
        sizes={"tiny": quick(16, 0.005, 40), "small": _SOON, "paper": _OKTOPK},
    ),
    "vit": Job(
        about="ViT-L/16, ImageNet (ADTopk)", embedded=DIGITS, make=vit,
        sizes={"tiny": quick(16, 2e-3, 60, optimizer="adamw"),
               "small": Settings(batch=32, rate=1e-3, epochs=10, optimizer="adamw", warmup=1),
               "paper": _VIT},
    ),
}  # fmt: skip

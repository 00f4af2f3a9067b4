"""The demo's job: 8 x 8 handwritten digits that ship inside scikit-learn, and a small MLP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Split:
    """Images as rows, and their labels."""

    images: Tensor  # (n, 64)
    labels: Tensor  # (n,)


def data(test_fraction: float = 0.3) -> tuple[Split, Split]:
    """A fixed split into training and test images, standardised by the training images."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    parts = train_test_split(
        torch.tensor(pixels, dtype=torch.float32),
        torch.tensor(labels),
        test_size=test_fraction,
        random_state=0,
        stratify=labels,
    )
    mean, deviation = parts[0].mean(), parts[0].std()
    train, test = ((x - mean) / deviation for x in parts[:2])
    return Split(images=train, labels=parts[2]), Split(images=test, labels=parts[3])


def model(width: int = 256) -> nn.Module:
    """Two hidden layers: 85,002 parameters."""
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )

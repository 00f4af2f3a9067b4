"""Networks for pictures, as the papers trained them."""

from __future__ import annotations

from torch import nn

VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)


def vgg16(classes: int = 10) -> nn.Module:
    """VGG-16 for 32 x 32 pictures, with batch norm and one linear layer: 14,728,266 parameters.

    Simonyan & Zisserman 2015 (arXiv 1409.1556), as Ok-Topk (arXiv 2201.07598) trained it.
    """
    layers: list[nn.Module] = []
    width = 3
    for wider in VGG16:
        if wider == 0:
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(width, wider, 3, padding=1), nn.BatchNorm2d(wider), nn.ReLU()]
            width = wider
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, classes))

"""Small networks for pictures, as the papers trained them; the large ones are in hub.py."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)


def mlp(inputs: int, width: int, hidden: int = 2, classes: int = 10) -> nn.Module:
    """Hidden layers of one width."""
    layers: list[nn.Module] = [nn.Flatten()]
    for _ in range(hidden):
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(width, classes))


def mnist_cnn(classes: int = 10) -> nn.Module:
    """Two convolutions and two linear layers for 28 x 28 pictures: 1,199,882 parameters.

    The network of PyTorch's MNIST example.
    """
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Dropout(0.25), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(128, classes),
    )  # fmt: skip


def vgg16(classes: int = 10, width: float = 1.0) -> nn.Module:
    """VGG-16 for 32 x 32 pictures, with batch norm and one linear layer: 14,728,266 parameters.

    Simonyan & Zisserman 2015 (arXiv 1409.1556), as Ok-Topk (arXiv 2201.07598) trained it.
    """
    layers: list[nn.Module] = []
    inputs = 3
    for wide in VGG16:
        if wide == 0:
            layers.append(nn.MaxPool2d(2))
        else:
            outputs = int(wide * width)
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
            inputs = outputs
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(inputs, classes))


class Residual(nn.Module):
    """Two convolutions beside a shortcut without parameters (option A of the paper)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self._stride, self._more = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        if self._more:  # every other pixel, and channels of zeros on both sides
            half = self._more // 2
            x = F.pad(x[:, :, :: self._stride, :: self._stride], (0, 0, 0, 0, half, half))
        return F.relu(x + y)


def resnet20(classes: int = 10, width: int = 16, blocks: int = 3) -> nn.Module:
    """ResNet-20 for 32 x 32 pictures: 269,722 parameters. He et al. 2016 (arXiv 1512.03385)."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
    ]  # fmt: skip
    inputs = width
    for stage in range(3):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Residual(inputs, width << stage, stride))
            inputs = width << stage
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
    return net

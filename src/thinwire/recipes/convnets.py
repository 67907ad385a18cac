"""Convolutional networks for 32 x 32 colour images, ten classes."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

_VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
"""Channels of each convolution; 0 stands for a pooling layer."""


class ResidualBlock(nn.Module):
    """Two convolutions, and a way around them that has no parameters."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.stride = num_out // num_in
        self.num_new = num_out - num_in
        self.body = nn.Sequential(
            nn.Conv2d(num_in, num_out, 3, stride=self.stride, padding=1, bias=False),
            nn.BatchNorm2d(num_out),
            nn.ReLU(inplace=True),
            nn.Conv2d(num_out, num_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(num_out),
        )

    def forward(self, x: Tensor) -> Tensor:
        around = x[:, :, :: self.stride, :: self.stride]
        around = nn.functional.pad(around, (0, 0, 0, 0, 0, self.num_new))
        return nn.functional.relu(self.body(x) + around)


def resnet20() -> nn.Module:
    """ResNet-20: three groups of three blocks, of 16, 32 and 64 channels."""
    channels = (16, 16, 16, 16, 32, 32, 32, 64, 64, 64)
    blocks = [ResidualBlock(num_in, num_out) for num_in, num_out in pairwise(channels)]
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return _initialised(nn.Sequential(*stem, *blocks, *head))


def vgg16() -> nn.Module:
    """VGG-16's convolutions with batch norm, and one dense layer where it has three for larger images."""
    layers: list[nn.Module] = []
    num_in = 3
    for num_out in _VGG16:
        if num_out == 0:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(num_in, num_out, 3, padding=1, bias=False), nn.BatchNorm2d(num_out)]
        layers.append(nn.ReLU(inplace=True))
        num_in = num_out
    return _initialised(nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.5), nn.Linear(512, 10)))


def _initialised(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model

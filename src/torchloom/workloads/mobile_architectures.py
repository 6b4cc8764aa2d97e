"""MobileNetV2 and EfficientNet: networks of inverted bottlenecks."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn


class Stage(NamedTuple):
    """Inverted bottlenecks of one width; the first has the stride."""

    expansion: int
    channels: int
    blocks: int
    stride: int
    kernel: int = 3


class Compound(NamedTuple):
    """How an EfficientNet is scaled from B0."""

    width: float
    depth: float
    pixels: int
    dropout: float


MOBILENET = (
    Stage(1, 16, 1, 1), Stage(6, 24, 2, 2), Stage(6, 32, 3, 2), Stage(6, 64, 4, 2),
    Stage(6, 96, 3, 1), Stage(6, 160, 3, 2), Stage(6, 320, 1, 1),
)  # fmt: skip
EFFICIENTNET = (
    Stage(1, 16, 1, 1), Stage(6, 24, 2, 2), Stage(6, 40, 2, 2, 5), Stage(6, 80, 3, 2),
    Stage(6, 112, 3, 1, 5), Stage(6, 192, 4, 2, 5), Stage(6, 320, 1, 1),
)  # fmt: skip
EFFICIENTNETS = (
    Compound(1.0, 1.0, 224, 0.2), Compound(1.0, 1.1, 240, 0.2), Compound(1.1, 1.2, 260, 0.3),
    Compound(1.2, 1.4, 300, 0.3), Compound(1.4, 1.8, 380, 0.4), Compound(1.6, 2.2, 456, 0.4),
    Compound(1.8, 2.6, 528, 0.5), Compound(2.0, 3.1, 600, 0.5),
)  # fmt: skip


class InvertedBottleneck(nn.Module):  # type: ignore[misc]
    """A wide depthwise convolution between two narrow ends; the input is added where the shape stays."""

    def __init__(
        self, inputs: int, outputs: int, stage: Stage, stride: int, activation: type[nn.Module], squeeze: bool
    ) -> None:
        super().__init__()
        wide = inputs * stage.expansion
        layers = [_conv(inputs, wide, 1, 1, activation)] if wide != inputs else []
        layers.append(_conv(wide, wide, stage.kernel, stride, activation, groups=wide))
        if squeeze:
            layers.append(SqueezeExcitation(wide, max(1, inputs // 4)))
        self.layers = nn.Sequential(*layers, _conv(wide, outputs, 1, 1, None))
        self.adds = inputs == outputs and stride == 1

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(images)
        return images + result if self.adds else result


class SqueezeExcitation(nn.Module):  # type: ignore[misc]
    """Weighs each channel by what all of them show on average."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.weigh = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, squeezed, 1), nn.SiLU(inplace=True),
            nn.Conv2d(squeezed, channels, 1), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images * self.weigh(images)


def _conv(
    inputs: int, outputs: int, kernel: int, stride: int, activation: type[nn.Module] | None, groups: int = 1
) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]
    return nn.Sequential(*layers) if activation is None else nn.Sequential(*layers, activation(inplace=True))


def _by_eight(width: float) -> int:
    """The nearest multiple of eight that is not much smaller, as both networks define their widths."""
    rounded = max(8, int(width + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * width else rounded + 8


def _build(
    stages: tuple[Stage, ...], classes: int, width: float, depth: float, last: int, dropout: float,
    activation: type[nn.Module], squeeze: bool,
) -> nn.Module:  # fmt: skip
    inputs = _by_eight(32 * width)
    layers = [_conv(3, inputs, 3, 2, activation)]
    for stage in stages:
        outputs = _by_eight(stage.channels * width)
        for place in range(math.ceil(stage.blocks * depth)):
            stride = 1 if place else stage.stride
            layers.append(InvertedBottleneck(inputs, outputs, stage, stride, activation, squeeze))
            inputs = outputs
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(last, classes)]
    return nn.Sequential(*layers, _conv(inputs, last, 1, 1, activation), *head)


def build_mobilenet(classes: int, scale: float) -> nn.Module:
    return _build(MOBILENET, classes, scale, 1.0, _by_eight(1280 * scale), 0.2, nn.ReLU6, squeeze=False)


def build_efficientnet(number: int, classes: int, scale: float) -> nn.Module:
    compound = EFFICIENTNETS[number]
    width = compound.width * scale
    last = 4 * _by_eight(320 * width)
    return _build(EFFICIENTNET, classes, width, compound.depth, last, compound.dropout, nn.SiLU, squeeze=True)

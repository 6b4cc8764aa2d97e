"""The architectures of the catalog in plain torch. At scale 1 they have the parameters of the published networks.

`scale` shrinks the widths of all layers and the images, so that a step takes milliseconds on one core; depths stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import nn

from torchloom.errors import BadInput
from torchloom.workloads.architecture_catalog import DEPTHS, suggest_architecture, suggest_depth
from torchloom.workloads.mobile_architectures import EFFICIENTNETS, build_efficientnet, build_mobilenet

LEAST_WIDTH = 4
"""Channels that a layer keeps at any scale."""
BASIC_BLOCKS_ORDER = (0, 1, 2, 3, 0, 1, 2, 3, 2, 1, 2, 2)
"""The stages to which resnet 12, 14 and so on add a block: 18 has (2, 2, 2, 2), 34 has (3, 4, 6, 3)."""
BOTTLENECK_BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
VGG_STAGES = {
    5: (1, 1), 6: (1, 1, 1), 7: (1, 1, 1, 1),
    11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4),
}  # fmt: skip
"""Convolutions before each pooling."""
VGG_WIDTHS = (64, 128, 256, 512, 512)
VGG_CODES = {51: (5, 0.25), 61: (6, 0.25), 71: (7, 0.25), 52: (5, 0.5), 62: (6, 0.5), 72: (7, 0.5)}
"""The layers of a code, and their part of the full width."""
SLIM = {"smresnet": 0.25, "mdresnet": 0.5}
INCEPTIONS = (
    (64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64), None,
    (192, 96, 208, 16, 48, 64), (160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64), (256, 160, 320, 32, 128, 128), None,
    (256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128),
)  # fmt: skip
"""GoogLeNet: channels of 1 × 1, 3 × 3 reduced and full, second 3 × 3 reduced and full, pooled; None is a pooling."""


class ImageSize(NamedTuple):
    """Pixels of a side: at scale 1, the least that the layers can halve, and a divisor."""

    full: int
    least: int
    multiple: int


def image_size(arch: str, depth: int, scale: float = 1.0) -> int:
    """Pixels of a side of the images that an architecture is trained with."""
    check_architecture(arch, depth, scale)
    size = ImageSize(224, 64, 32)
    if arch == "efficientnet-b":
        size = ImageSize(EFFICIENTNETS[depth].pixels, 64, 1)
    elif arch == "small":
        size = ImageSize(64, 16, 16)
    elif arch.endswith("_cifar10"):
        size = ImageSize(32, 32, 32) if arch == "vgg_cifar10" else ImageSize(32, 16, 4)
    return max(size.least, math.floor(size.full * scale / size.multiple) * size.multiple)


def build(arch: str, depth: int, classes: int = 1000, scale: float = 1.0) -> nn.Module:
    """An untrained network; its parameters are drawn from torch's generator."""
    check_architecture(arch, depth, scale)
    match arch:
        case "resnet" | "smresnet" | "mdresnet":
            return _build_resnet(depth, classes, scale * SLIM.get(arch, 1.0))
        case "vgg":
            layers, part = VGG_CODES.get(depth, (depth, 1.0))
            return _build_vgg(layers, classes, scale * part)
        case "googlenet":
            return _build_googlenet(classes, scale)
        case "mobilenet_v":
            return build_mobilenet(classes, scale)
        case "efficientnet-b":
            return build_efficientnet(depth, classes, scale)
        case "resnet_cifar10":
            return _build_cifar_resnet(depth, classes, scale)
        case "vgg_cifar10":
            return _build_cifar_vgg(depth, classes, scale)
    return _build_small(depth, classes, scale)


def check_architecture(arch: str, depth: int, scale: float = 1.0) -> None:
    if arch not in DEPTHS:
        raise BadInput(f"there is no architecture {arch!r}", hint=suggest_architecture(arch))
    if depth not in DEPTHS[arch]:
        raise BadInput(f"{arch} has no depth {depth}", hint=suggest_depth(arch))
    if not 0 < scale <= 1:
        raise BadInput(f"scale {scale:g}", hint="above 0, and at most 1")


def _widths(channels: Iterable[int], scale: float) -> list[int]:
    return [max(LEAST_WIDTH, round(width * scale)) for width in channels]


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1, *, activation: bool = True) -> nn.Sequential:
    """A convolution with batch normalisation."""
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    ]
    return nn.Sequential(*layers, nn.ReLU(inplace=True)) if activation else nn.Sequential(*layers)


def _head(inputs: int, classes: int, dropout: float = 0.0) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(inputs, classes)]


# ── resnet ──


class Residual(nn.Module):  # type: ignore[misc]
    """Layers whose input is added to their output."""

    def __init__(self, layers: nn.Module, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.layers = layers
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else _conv(inputs, outputs, 1, stride, activation=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layers(images) + self.shortcut(images))


def _basic(inputs: int, width: int, stride: int) -> Residual:
    layers = nn.Sequential(_conv(inputs, width, 3, stride), _conv(width, width, 3, activation=False))
    return Residual(layers, inputs, width, stride)


def _bottleneck(inputs: int, width: int, stride: int) -> Residual:
    layers = nn.Sequential(
        _conv(inputs, width, 1), _conv(width, width, 3, stride), _conv(width, 4 * width, 1, activation=False)
    )
    return Residual(layers, inputs, 4 * width, stride)


def basic_blocks(depth: int) -> tuple[int, ...]:
    """Blocks of the four stages of a resnet with that many layers."""
    blocks = [1, 1, 1, 1]
    for stage in BASIC_BLOCKS_ORDER[: (depth - 10) // 2]:
        blocks[stage] += 1
    return tuple(blocks)


def _stages(
    block: Callable[[int, int, int], Residual], growth: int, inputs: int, widths: Iterable[int], counts: Iterable[int]
) -> tuple[list[nn.Module], int]:
    """Stages of residual blocks, of which all but the first halve the image; and their channels at the end."""
    layers: list[nn.Module] = []
    for stage, (width, count) in enumerate(zip(widths, counts, strict=True)):
        for place in range(count):
            layers.append(block(inputs, width, 2 if stage and not place else 1))
            inputs = width * growth
    return layers, inputs


def _build_resnet(depth: int, classes: int, scale: float) -> nn.Module:
    widths = _widths((64, 128, 256, 512), scale)
    deep = depth in BOTTLENECK_BLOCKS
    counts = BOTTLENECK_BLOCKS[depth] if deep else basic_blocks(depth)
    stages, outputs = _stages(_bottleneck if deep else _basic, 4 if deep else 1, widths[0], widths, counts)
    return nn.Sequential(_conv(3, widths[0], 7, 2), nn.MaxPool2d(3, 2, 1), *stages, *_head(outputs, classes))


def _build_cifar_resnet(depth: int, classes: int, scale: float) -> nn.Module:
    widths = _widths((16, 32, 64), scale)
    stages, outputs = _stages(_basic, 1, widths[0], widths, [(depth - 2) // 6] * 3)
    return nn.Sequential(_conv(3, widths[0], 3), *stages, *_head(outputs, classes))


# ── vgg, small ──


def _build_vgg(layers: int, classes: int, scale: float) -> nn.Module:
    features: list[nn.Module] = []
    inputs = 3
    for width, count in zip(_widths(VGG_WIDTHS, scale), VGG_STAGES[layers], strict=False):
        for _ in range(count):
            features += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = width
        features.append(nn.MaxPool2d(2))
    (hidden,) = _widths((4096,), scale)
    return nn.Sequential(
        *features, nn.AdaptiveAvgPool2d(7), nn.Flatten(),
        nn.Linear(inputs * 49, hidden), nn.ReLU(inplace=True), nn.Dropout(),
        nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(hidden, classes),
    )  # fmt: skip


def _build_cifar_vgg(layers: int, classes: int, scale: float) -> nn.Module:
    features: list[nn.Module] = []
    inputs = 3
    for width, count in zip(_widths(VGG_WIDTHS, scale), VGG_STAGES[layers], strict=True):
        for _ in range(count):
            features.append(_conv(inputs, width, 3))
            inputs = width
        features.append(nn.MaxPool2d(2))
    return nn.Sequential(*features, *_head(inputs, classes))


def _build_small(depth: int, classes: int, scale: float) -> nn.Module:
    """Convolutions of 32, 64, 128 and then 128 channels; the first four halve the image."""
    features: list[nn.Module] = []
    inputs = 3
    for place, width in enumerate(_widths(((32, 64, 128)[min(i, 2)] for i in range(depth - 1)), scale)):
        features.append(_conv(inputs, width, 3, 2 if place < 4 else 1))
        inputs = width
    return nn.Sequential(*features, *_head(inputs, classes))


# ── googlenet ──


class Inception(nn.Module):  # type: ignore[misc]
    """Four branches over the same images, side by side in the result."""

    def __init__(self, branches: Iterable[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(images) for branch in self.branches], 1)


def _build_googlenet(classes: int, scale: float) -> nn.Module:
    first, second = _widths((64, 192), scale)
    layers: list[nn.Module] = [
        _conv(3, first, 7, 2), nn.MaxPool2d(3, 2, 1),
        _conv(first, first, 1), _conv(first, second, 3), nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    inputs = second
    for channels in INCEPTIONS:
        if channels is None:
            layers.append(nn.MaxPool2d(3, 2, 1))
            continue
        one, reduced, three, reduced_again, five, pooled = _widths(channels, scale)
        branches = (
            _conv(inputs, one, 1),
            nn.Sequential(_conv(inputs, reduced, 1), _conv(reduced, three, 3)),
            nn.Sequential(_conv(inputs, reduced_again, 1), _conv(reduced_again, five, 3)),
            nn.Sequential(nn.MaxPool2d(3, 1, 1), _conv(inputs, pooled, 1)),
        )
        layers.append(Inception(branches))
        inputs = one + three + five + pooled
    return nn.Sequential(*layers, *_head(inputs, classes, 0.2))

"""The architectures that a row of a workload file can name, with the depths of each. It needs no torch.

Most depths count layers with weights. The others are codes:

| arch | depth | meaning |
|---|---|---|
| resnet | 10 to 34 | basic blocks; 18 and 34 are the standard ones, the others have as many layers as they say |
| resnet | 50, 101, 152 | bottleneck blocks, the standard ones |
| smresnet, mdresnet | 10 to 34 | a resnet at a quarter of the width, and at half of it |
| vgg | 11, 13, 16, 19 | the standard ones |
| vgg | 5, 6, 7 | 2, 3 and 4 convolutions with a pooling each, and the three linear layers of vgg |
| vgg | 51, 61, 71 | vgg 5, 6 and 7 at a quarter of the width |
| vgg | 52, 62, 72 | vgg 5, 6 and 7 at half of the width |
| googlenet | 1 | version 1, without auxiliary classifiers |
| mobilenet_v | 2 | version 2 |
| efficientnet-b | 0 to 7 | B0 to B7 |
| small | 2 to 10 | that many layers: convolutions, then one linear layer |
| resnet_cifar10 | 20, 32, 50 | 6 n + 2 layers for images of 32 × 32 |
| vgg_cifar10 | 11, 13, 16, 19 | the convolutions of vgg with batch normalisation, and one linear layer |
"""

from __future__ import annotations

from collections.abc import Mapping

from torchloom.shared.suggestions import did_you_mean

_BASIC = tuple(range(10, 35, 2))
DEPTHS: Mapping[str, tuple[int, ...]] = {
    "resnet": (*_BASIC, 50, 101, 152),
    "smresnet": _BASIC,
    "mdresnet": _BASIC,
    "vgg": (5, 6, 7, 11, 13, 16, 19, 51, 52, 61, 62, 71, 72),
    "googlenet": (1,),
    "mobilenet_v": (2,),
    "efficientnet-b": tuple(range(8)),
    "small": tuple(range(2, 11)),
    "resnet_cifar10": (20, 32, 50),
    "vgg_cifar10": (11, 13, 16, 19),
}
"""The depths of each architecture."""


def suggest_architecture(arch: str) -> str:
    """What to write in place of a name that is unknown."""
    return did_you_mean(arch, list(DEPTHS))


def suggest_depth(arch: str) -> str:
    """The depths that a known architecture has."""
    return f"{arch} has {', '.join(map(str, DEPTHS[arch]))}"

"""Every architecture of the catalog trains at a small scale; the standard ones have the published parameters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from torchloom.errors import BadInput
from torchloom.workloads.architecture_catalog import DEPTHS
from torchloom.workloads.architectures import basic_blocks, build, image_size

EVERY = [(arch, depth) for arch, depths in DEPTHS.items() for depth in depths]
SLOW = {("resnet", 101), ("resnet", 152), *(("efficientnet-b", number) for number in range(3, 8))}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests run side by side; more threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def parameters(arch: str, depth: int, classes: int = 1000) -> int:
    with torch.device("meta"):  # only their shapes are needed
        network = build(arch, depth, classes)
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize(
    ("arch", "depth", "count"),
    [
        ("resnet", 18, 11_689_512),
        ("resnet", 34, 21_797_672),
        ("resnet", 50, 25_557_032),
        ("resnet", 101, 44_549_160),
        ("resnet", 152, 60_192_808),
        ("vgg", 11, 132_863_336),
        ("vgg", 13, 133_047_848),
        ("vgg", 16, 138_357_544),
        ("vgg", 19, 143_667_240),
        ("googlenet", 1, 6_624_904),
        ("mobilenet_v", 2, 3_504_872),
        ("efficientnet-b", 0, 5_288_548),
        ("efficientnet-b", 1, 7_794_184),
        ("efficientnet-b", 7, 66_347_960),
    ],
)
def test_a_standard_network_has_the_published_parameters(arch: str, depth: int, count: int) -> None:
    assert parameters(arch, depth) == count


@pytest.mark.parametrize(
    ("arch", "depth"),
    [pytest.param(*each, marks=[pytest.mark.long] if each in SLOW else []) for each in EVERY],
    ids=str,
)
def test_every_network_trains_at_a_small_scale(arch: str, depth: int) -> None:
    torch.manual_seed(1)
    network = build(arch, depth, classes=10, scale=0.05)
    pixels = image_size(arch, depth, scale=0.05)
    outputs = network(torch.randn(2, 3, pixels, pixels))
    assert outputs.shape == (2, 10)
    torch.nn.functional.cross_entropy(outputs, torch.tensor([1, 2])).backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in network.parameters())


def test_resnets_between_the_standard_ones_have_as_many_layers_as_they_say() -> None:
    depths = range(10, 35, 2)
    assert [2 + 2 * sum(basic_blocks(depth)) for depth in depths] == list(depths)
    assert (basic_blocks(18), basic_blocks(34)) == ((2, 2, 2, 2), (3, 4, 6, 3))


@pytest.mark.parametrize(
    ("code", "layers", "part"), [(51, 5, 4), (61, 6, 4), (71, 7, 4), (52, 5, 2), (62, 6, 2), (72, 7, 2)]
)
def test_a_code_of_vgg_is_its_layers_and_a_part_of_the_width(code: int, layers: int, part: int) -> None:
    with torch.device("meta"):
        slim, full = build("vgg", code), build("vgg", layers)
    widths = [[m.out_channels for m in network if isinstance(m, torch.nn.Conv2d)] for network in (slim, full)]
    linear = [sum(isinstance(m, torch.nn.Linear) for m in network) for network in (slim, full)]
    assert [len(each) + count for each, count in zip(widths, linear, strict=True)] == [layers, layers]
    assert [width * part for width in widths[0]] == widths[1]


def test_slim_resnets_have_a_quarter_and_half_of_the_width() -> None:
    with torch.device("meta"):
        widths = [build(arch, 18)[0][0].out_channels for arch in ("smresnet", "mdresnet", "resnet")]
    assert widths == [16, 32, 64]


def test_the_scale_shrinks_networks_and_images_and_nothing_grows() -> None:
    assert image_size("resnet", 18) == 224
    assert image_size("efficientnet-b", 7) == 600
    for arch, depth in EVERY:
        assert image_size(arch, depth, 0.05) <= image_size(arch, depth, 0.5) <= image_size(arch, depth)
    with torch.device("meta"):
        small, large = (sum(p.numel() for p in build("vgg", 11, 10, scale).parameters()) for scale in (0.05, 0.1))
    assert small < large / 2


@pytest.mark.parametrize(
    ("arch", "depth", "scale", "hint"),
    [
        ("resnt", 18, 1.0, "did you mean resnet"),
        ("resnet", 17, 1.0, "resnet has 10, 12"),
        ("resnet", 18, 0.0, "above 0"),
        ("resnet", 18, 2.0, "at most 1"),
        ("resnet", 18, float("nan"), "above 0"),
    ],
)
def test_what_there_is_not_is_refused(arch: str, depth: int, scale: float, hint: str) -> None:
    with pytest.raises(BadInput) as refused:
        build(arch, depth, scale=scale)
    assert hint in refused.value.hint

"""HOST:PORT is read and written in one way everywhere."""

from __future__ import annotations

import pytest

from torchloom.shared.addresses import is_loopback, join_address, split_address, split_url


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:29510", ("127.0.0.1", 29510)),
        ("host:0", ("host", 0)),
        ("[fd00::1]:29510", ("fd00::1", 29510)),
    ],
)
def test_an_address_is_split_and_joined_again(text: str, address: tuple[str, int]) -> None:
    assert split_address(text) == address
    assert join_address(*address) == text


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":29510", "host:x", "host:-1", "fd00::1", "[fd00::1]", "[]:1", "host:" + "9" * 5000]
)
def test_anything_else_is_no_address(text: str) -> None:
    assert split_address(text) is None


def test_a_url_has_a_host_and_a_port_with_or_without_a_path() -> None:
    assert split_url("tls://[fd00::1]:4222") == ("fd00::1", 4222)
    assert split_url("https://127.0.0.1:80/alertmanager") == ("127.0.0.1", 80)
    with pytest.raises(ValueError, match="no host and port"):
        split_url("")


@pytest.mark.parametrize(
    ("host", "loopback"), [("localhost", True), ("127.0.0.2", True), ("::1", True), ("10.0.0.1", False), ("h", False)]
)
def test_loopback_is_recognised(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback

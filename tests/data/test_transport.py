"""Packets between two ends of a socket: of any size, with descriptors, until the other end has gone."""

from __future__ import annotations

import os

import pytest

from torchloom.data.loaders.transport import PACKET_BYTES, Receiver, send, shut_down, socket_pair


@pytest.mark.parametrize("size", [0, 1, PACKET_BYTES, PACKET_BYTES + 1, 10 * PACKET_BYTES])
def test_packets_of_any_size_arrive_whole(size: int) -> None:
    here, there = socket_pair()
    content = os.urandom(size)
    assert send(there, b"k", content, epoch=3, number=2**40)
    packet = Receiver(here).receive()
    assert packet is not None
    assert (packet.kind, packet.epoch, packet.number, bytes(packet.payload)) == (b"k", 3, 2**40, content)
    assert packet.descriptors == []
    here.close()
    there.close()


def test_descriptors_are_passed() -> None:
    here, there = socket_pair()
    reading, writing = os.pipe()
    send(there, b"k", b"", descriptors=[reading, writing])
    packet = Receiver(here).receive()
    assert packet is not None
    os.write(packet.descriptors[1], b"through")
    assert os.read(packet.descriptors[0], 10) == b"through"
    for descriptor in (reading, writing, *packet.descriptors):
        os.close(descriptor)
    here.close()
    there.close()


def test_what_a_process_sent_before_it_died_is_read_although_it_left_messages_unread() -> None:
    here, there = socket_pair()
    send(there, b"k", b"last")
    send(here, b"k", b"never read")
    there.close()
    receiver = Receiver(here)
    packet = receiver.receive(wait=False)
    assert packet is not None
    assert bytes(packet.payload) == b"last"
    assert receiver.receive(wait=False) is None
    here.close()


def test_a_full_socket_does_not_block_who_does_not_wait() -> None:
    here, there = socket_pair()
    sent = 0
    while send(here, b"k", bytes(1000), wait=False):
        sent += 1
    receiver = Receiver(there)
    for _ in range(sent):
        assert receiver.receive(wait=False) is not None
    with pytest.raises(BlockingIOError):
        receiver.receive(wait=False)
    here.close()
    there.close()


def test_the_end_is_seen_also_if_the_socket_has_a_copy() -> None:
    here, there = socket_pair()
    copy = here.dup()
    shut_down(here)
    assert Receiver(there).receive() is None
    with pytest.raises(OSError):
        send(there, b"k", b"")
    copy.close()
    there.close()

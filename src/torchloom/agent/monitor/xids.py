"""What the NVIDIA driver's error numbers (XIDs) mean, and which of them say that a GPU cannot be used any more.

The meaning of each is NVIDIA's, from its catalogue of XIDs. Fatal are those after which it asks for a reset, a reboot
or a repair: until then nothing computed there is to be trusted. Where it asks only to start the application again, or
to reset when convenient, the device is warned about and stays in use. So is one whose number is not in the table: what
nobody has weighed must not take a device away.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from torchloom.protocol.phrase import Phrase, phrase


class Xid(NamedTuple):
    meaning: str
    fatal: bool = False


FATAL: Final = True

XIDS: Final[dict[int, Xid]] = {
    8: Xid("a channel got no further"),
    11: Xid("invalid commands from the application"),
    13: Xid("graphics engine exception, mostly by the application"),
    31: Xid("memory page fault, mostly by the application"),
    32: Xid("corrupted push buffer"),
    43: Xid("the application was stopped after its own error"),
    45: Xid("the application was cleaned up after its end or an earlier error"),
    46: Xid("GPU stopped processing", FATAL),
    48: Xid("uncorrected double-bit ECC error", FATAL),
    61: Xid("internal micro-controller breakpoint"),
    62: Xid("internal micro-controller halted", FATAL),
    63: Xid("memory is to be remapped at the next reset"),
    64: Xid("memory could not be remapped", FATAL),
    68: Xid("video decoder exception, mostly by the application"),
    69: Xid("graphics engine class error, mostly by the application"),
    74: Xid("NVLink error", FATAL),
    79: Xid("GPU has fallen off the bus", FATAL),
    92: Xid("many corrected ECC errors"),
    94: Xid("contained memory error: only the application it hit is affected"),
    95: Xid("uncontained memory error", FATAL),
    109: Xid("context switch timed out, mostly by the application"),
    119: Xid("GPU system processor does not answer", FATAL),
    120: Xid("GPU system processor error", FATAL),
    121: Xid("corrected error on the link to the processor"),
    140: Xid("ECC error that was not recovered from", FATAL),
    143: Xid("GPU could not be initialised", FATAL),
    154: Xid("the driver asks for another way to recover"),
}

UNKNOWN: Final = Xid("not in the table")


def explain(number: int) -> Xid:
    return XIDS.get(number, UNKNOWN)


def describe(number: int) -> Phrase:
    return phrase("xid", number=number, meaning=explain(number).meaning)

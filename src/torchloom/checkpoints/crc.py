"""CRC-32, as in zip files: from ISA-L where it is installed, which is several times faster than zlib and as exact."""

from __future__ import annotations

__all__ = ["crc32"]

try:
    from isal.isal_zlib import crc32
except ImportError:  # no wheel for this machine
    from zlib import crc32

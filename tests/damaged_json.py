"""JSON documents as a bad disk, a full one, a careless person or a malicious process leaves them."""

from __future__ import annotations

import re

NESTED = b'{"x":' + b"[" * 100_000
GARBAGE = (
    b"", b"\0", b"\xff", b"@", b"{", b'{"is":', b"null", b"[]", b"{}", b"[1]", b'"text"', b'"\xff"', b'{"\xff":1}',
    b'{"is":"\xff"}', b'{"key":"\xff"}', b'{"x":["\xff"]}', b'"\\ud800"', b"1e999", b"9" * 5000,
    b'{"a":' + b"9" * 5000 + b"}",
    b"[" * 100_000, b'{"a":' * 100_000, NESTED,
)  # fmt: skip


def damage(document: bytes) -> tuple[bytes, ...]:
    """It is empty, cut off, another one, has strings that are not UTF-8, is nested deeply."""
    return b"", document[:-1], b"[]", re.sub(rb'([:\[]\s*)"', b'\\1"\xff', document), NESTED

"""What a keeper's folder remembers of its ranks: KEY.begun.json from the start, KEY.end.json from the end.

A file appears whole or not at all, and is there before anyone is told of it. It outlives the death of any process;
it is not synced to the disk, because a crash of the machine ends all the ranks, and then nobody asks how.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import msgspec

from torchloom.agent.supervisor.protocol import Begun, Ended, RankRecord, encode
from torchloom.shared.files import replace_file

BEGUN = ".begun.json"
END = ".end.json"


class ExitRecordStore:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def began(self, begun: Begun) -> None:
        self._write(begun.key + BEGUN, encode(begun))

    def ended(self, ended: Ended) -> None:
        self._write(ended.key + END, encode(ended))

    def forget(self, key: str) -> None:
        for suffix in (BEGUN, END):
            with contextlib.suppress(OSError):
                (self.folder / (key + suffix)).unlink(missing_ok=True)

    def read(self) -> dict[str, RankRecord]:
        """All that is remembered, in the order of starting. A file that cannot be read is passed over."""
        found: list[RankRecord] = []
        for path in self.folder.glob("[!.]*" + BEGUN):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                begun = msgspec.json.decode(path.read_bytes(), type=Begun)
                ended = None
                with contextlib.suppress(OSError, msgspec.MsgspecError):
                    data = (self.folder / (begun.key + END)).read_bytes()
                    ended = msgspec.json.decode(data, type=Ended)
                found.append(RankRecord(begun=begun, ended=ended))
        return {kept.begun.key: kept for kept in sorted(found, key=lambda kept: kept.begun.at)}

    def _write(self, name: str, data: bytes) -> None:
        try:
            replace_file(self.folder / name, data, sync=False)
        except OSError as error:  # a full disk must not kill the keeper, and all ranks with it
            print(f"cannot write {name}: {error.strerror}", file=sys.stderr, flush=True)

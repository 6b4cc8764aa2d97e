"""After any sequence of saves, kills, damage, deletions and leaps of the clock the newest whole one is found."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.checkpoints.victims import leftovers
from tests.examples import examples
from torchloom.checkpoints.store import commit
from torchloom.checkpoints.store import manifest as manifests
from torchloom.checkpoints.store.checksums import ChecksummedFile
from torchloom.checkpoints.store.locks import WriterLock
from torchloom.checkpoints.store.manifest import Manifest, folder_name
from torchloom.checkpoints.store.retention import Keep, prune
from torchloom.checkpoints.store.search import latest
from torchloom.errors import NoValidCheckpoint

STEPS = st.integers(0, 30)
SIZE = 40


class Folder(RuleBasedStateMachine):
    """Two books are kept: the folder, and which content stands for which step."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.whole: dict[int, bytes] = {}
        self.damaged: set[int] = set()
        self.now = 1_800_000_000.0
        self.count = 0

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    def begin(self, step: int) -> tuple[Path, bytes, Manifest]:
        """A draft with its file written."""
        self.count += 1
        content = self.count.to_bytes(4, "big") * (SIZE // 4)
        path = commit.hidden(self.folder, "saving", step, commit.new_id())
        path.mkdir()
        with ChecksummedFile(path / "state.pt", chunk=16) as sink:
            sink.write(content)
            entry = sink.finish()
        return path, content, Manifest(step=step, files=(entry,), created=self.now)

    @initialize(step=STEPS)
    def begins(self, step: int) -> None:
        self.save(step)

    @rule(step=STEPS)
    def save(self, step: int) -> None:
        path, content, manifest = self.begin(step)
        commit.commit(path, manifest)
        self.whole[step] = content
        self.damaged.discard(step)

    @rule(step=STEPS, sealed=st.booleans(), size=st.integers(0, SIZE))
    def is_killed_midway(self, step: int, sealed: bool, size: int) -> None:
        path, content, manifest = self.begin(step)
        if sealed:
            commit.write_durably(path / manifests.NAME, manifests.encode(manifest))
        else:
            (path / "state.pt").write_bytes(content[:size])

    @precondition(lambda self: self.whole)
    @rule(data=st.data())
    def is_killed_while_deleting(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.whole)))
        (self.folder / folder_name(step)).rename(commit.hidden(self.folder, "deleting", step, commit.new_id()))
        del self.whole[step]

    @precondition(lambda self: self.whole)
    @rule(data=st.data(), name=st.sampled_from(["state.pt", manifests.NAME]), bit=st.integers(0, 7))
    def a_bit_flips(self, data: st.DataObject, name: str, bit: int) -> None:
        step = data.draw(st.sampled_from(sorted(self.whole)))
        file = self.folder / folder_name(step) / name
        content = bytearray(file.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << bit
        file.write_bytes(content)
        self.damage(step)

    @precondition(lambda self: self.whole)
    @rule(data=st.data(), name=st.sampled_from(["state.pt", manifests.NAME]))
    def a_file_is_cut_off(self, data: st.DataObject, name: str) -> None:
        step = data.draw(st.sampled_from(sorted(self.whole)))
        file = self.folder / folder_name(step) / name
        content = file.read_bytes()
        file.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
        self.damage(step)

    def damage(self, step: int) -> None:
        del self.whole[step]
        self.damaged.add(step)

    @rule(hours=st.integers(-100, 100))
    def the_clock_leaps(self, hours: int) -> None:
        self.now += hours * 3600

    @rule(keep=st.builds(Keep, st.none() | st.integers(1, 4), st.none() | st.integers(1, 90), st.none() | st.just(5)))
    def prunes(self, keep: Keep) -> None:
        newest = max(self.whole, default=None)
        pruned = prune(self.folder, keep, self.now)
        for name in pruned.deleted:
            step = int(name.removeprefix("step-"))
            self.whole.pop(step, None)
            self.damaged.discard(step)
        if newest is not None:
            assert self.whole, "the last good one is never deleted"

    @rule()
    def the_next_writer_comes(self) -> None:
        lock = WriterLock(self.folder)
        commit.clean(self.folder)
        lock.close()
        assert leftovers(self.folder) == []

    @invariant()
    def the_newest_whole_one_is_found(self) -> None:
        newest = max(self.whole, default=-1)
        rejected = {folder_name(step) for step in self.damaged if step > newest}
        if newest < 0:
            with pytest.raises(NoValidCheckpoint) as caught:
                latest(self.folder)
            assert set(caught.value.rejected) == rejected
            return
        found = latest(self.folder)
        assert (found.step, set(found.rejected)) == (newest, rejected)
        assert (found.path / "state.pt").read_bytes() == self.whole[newest]


TestFolder = Folder.TestCase
TestFolder.settings = examples(40, stateful_step_count=25)

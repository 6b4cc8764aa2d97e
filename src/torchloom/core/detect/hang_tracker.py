"""Hangs of one job over time: what a single look cannot know.

Ranks are heard one after the other, a beat apart. When a long pause ends, the first rank to be heard has moved while
the others still seem to stand where they were. So a hang of some ranks while others continue must be seen for a while.
A rank that comes back out of a phase, a pause or a stop has made no step meanwhile and is not to blame for that.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchloom.core.detect.hang import HangDiagnosis, RankProgress, diagnose
from torchloom.settings import Settings

NEWS = 2.5
"""Beats after which everyone has been heard again."""


class HangTracker:
    """Ask it once in a while with where the ranks of a job stand; those that are paused are left out."""

    __slots__ = ("_back", "_lone", "_since")

    def __init__(self) -> None:
        self._back: dict[int, float] = {}
        """Rank → since when it is here and expected to make steps."""
        self._lone: tuple[int, ...] = ()
        self._since = 0.0
        """When the lone ranks were first seen to hang."""

    def look(
        self, ranks: Sequence[RankProgress], settings: Settings, now: float, beat: float = 1.0
    ) -> HangDiagnosis | None:
        return self.judge([self.fair(progress, now) for progress in ranks], settings, now, beat)

    def judge(
        self, ranks: Sequence[RankProgress], settings: Settings, now: float, beat: float = 1.0, suspect: bool = True
    ) -> HangDiagnosis | None:
        """The same of stands that are `fair` already. Without a `suspect` (`hang.is_suspect`) there is no verdict.

        A caller that goes through many ranks in slices finds out about both on its way.
        """
        diagnosis = diagnose(ranks, settings) if suspect else None
        if len(self._back) > len(ranks):
            here = {progress.rank for progress in ranks}
            self._back = {rank: at for rank, at in self._back.items() if rank in here}
        if diagnosis is None or not diagnosis.lone:
            self._lone = ()
            return diagnosis
        if diagnosis.culprits != self._lone:
            self._lone, self._since = diagnosis.culprits, now
        return diagnosis if now - self._since >= NEWS * beat else None

    def fair(self, progress: RankProgress, now: float) -> RankProgress:
        """Without the time in which it was not expected to make a step."""
        back = self._back.get(progress.rank)
        if back is None or progress.aside or progress.frozen:
            self._back[progress.rank] = now
            return progress if back is not None else progress._replace(idle_seconds=0.0)
        return progress._replace(idle_seconds=now - back) if now - back < progress.idle_seconds else progress

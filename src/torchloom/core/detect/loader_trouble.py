"""Trouble of processes that load data: one died, or one hangs. A rank reports it in its beats while it is recent."""

from __future__ import annotations

import signal

from torchloom.core.detect.detector import Finding
from torchloom.protocol.data_loading import LoaderTrouble, Loading
from torchloom.protocol.phrase import Prose, phrase
from torchloom.protocol.rank import Beat

KINDS_OF = {"died": "loader_died", "hung": "loader_hung"}


class LoaderTroubleDetector:
    """It examines every beat, because a rank that waits for data makes no steps."""

    __slots__ = ("_deaths", "is_open")

    def __init__(self) -> None:
        self.is_open: LoaderTrouble | None = None
        self._deaths = 0
        """Before the trouble began."""

    def hear(self, beat: Beat) -> tuple[Finding, ...]:
        loading = beat.loading
        trouble = loading.trouble if loading is not None else None
        before, self.is_open = self.is_open, trouble
        ended = before is not None and (trouble is None or trouble.what != before.what)
        began = trouble is not None and (before is None or ended)
        findings = []
        if ended and before is not None:
            lost = loading.deaths - self._deaths if loading is not None else 0
            is_replaced = before.what == "died" or lost > 0
            over = phrase("loaders_replaced", count=lost) if is_replaced else phrase("loader_goes_on")
            findings.append(Finding(KINDS_OF[before.what], over, over=True, step=beat.step))
        if began and trouble is not None and loading is not None:
            self._deaths = loading.deaths - (trouble.what == "died")
            findings.append(_finding(trouble, loading, beat.step))
        return tuple(findings)


def _finding(trouble: LoaderTrouble, loading: Loading, step: int) -> Finding:
    evidence: list[Prose] = [phrase("loader_had", indices=trouble.indices)] if trouble.indices else []
    if trouble.what == "died":
        what = phrase("loader_died", loader=trouble.loader, pid=trouble.pid, how=_how(trouble.status))
        evidence.append(phrase("loaders_lost", deaths=loading.deaths, loaders=loading.loaders))
    else:
        what = phrase("loader_hangs", loader=trouble.loader, pid=trouble.pid, seconds=trouble.seconds)
        evidence += [trouble.stack] if trouble.stack else []
    return Finding(KINDS_OF[trouble.what], what, tuple(evidence), step=step)


def _how(status: int | None) -> Prose:
    if status is None:
        return ""
    if status >= 0:
        return phrase("exit_code", status=status)
    known = -status in signal.valid_signals()
    return phrase("killed_by", signal=signal.Signals(-status).name if known else str(-status))

"""Reports of a rank that wait until the server has stored them: in order, the newest 100."""

from __future__ import annotations

import logging
import threading
from typing import Any

import msgspec
from msgspec.structs import replace

from torchloom.protocol.codec import decode_report, encode
from torchloom.protocol.rank import Discarded, Healed, Regrouped, Resumed, Saved, SaveFailed

logger = logging.getLogger("torchloom")
MOST = 100
"""Most reports kept; past it the oldest is dropped."""
MAX_TEXT = 2000
MAX_NAME = 255
MAX_NAMES = 100
News = Saved | SaveFailed | Resumed | Regrouped | Healed | Discarded


class Outbox:
    """Filled by any thread, emptied by the link thread.

    An incarnation that was not welcomed yet may have to take a newer id, and the weaver ignores what it reported under
    the old one. Reports stored before the welcome are therefore kept, to be sent again (`send_again`).
    """

    def __init__(self) -> None:
        self.dropped = 0
        """Reports that were never stored."""
        self._waiting: dict[int, News] = {}
        self._count = 0
        self._stored = 0
        """The number of the last report that the server has stored."""
        self._lock = threading.Lock()

    def put(self, news: News) -> None:
        """Add a report. Never blocks; one that the weaver could not decode is dropped with a warning."""
        try:
            news = fit_bounds(news)
            decode_report(encode(news))
        except (msgspec.MsgspecError, TypeError, ValueError, AttributeError) as error:
            logger.warning("torchLoom: %s cannot be reported: %s", type(news).__name__, error)
            return
        with self._lock:
            self._count += 1
            self._waiting[self._count] = news
            oldest = next(iter(self._waiting))
            full = len(self._waiting) > MOST
            lost = full and oldest > self._stored
            if full:
                del self._waiting[oldest]
            self.dropped += lost
        if lost and (self.dropped == 1 or self.dropped % MOST == 0):
            logger.warning("torchLoom: the weaver cannot be reached; reports dropped so far: %d", self.dropped)

    def first(self) -> tuple[int, News] | None:
        """The next report to send, with its number."""
        with self._lock:
            return next(((number, news) for number, news in self._waiting.items() if number > self._stored), None)

    def stored(self, number: int, sure: bool) -> None:
        """The server has stored this one; `sure` if it need not be sent again under another incarnation."""
        with self._lock:
            self._stored = max(self._stored, number)
            if sure:
                self._waiting = {later: news for later, news in self._waiting.items() if later > self._stored}

    def send_again(self) -> None:
        """Send everything again: the weaver ignores what was sent so far."""
        with self._lock:
            self._stored = 0


def fit_bounds(news: News) -> News:
    """The same report within its bounds: texts are shortened, and undecodable file names made printable."""
    texts: dict[str, Any] = {
        name: _text(value) for name in news.__struct_fields__ if isinstance(value := getattr(news, name), str)
    }
    if isinstance(news, Resumed):
        some = list(news.rejected.items())[:MAX_NAMES]
        texts["rejected"] = {_text(name, MAX_NAME): _text(why) for name, why in some}
    return replace(news, **texts)


def _text(text: str, most: int = MAX_TEXT) -> str:
    return text.encode("utf-8", "replace").decode()[:most]  # lone surrogates have no UTF-8

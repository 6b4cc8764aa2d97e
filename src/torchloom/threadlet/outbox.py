"""News that a rank has for the weaver, kept until the server has it on disk: in order, the newest of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from torchloom.messages import Discarded, Healed, Regrouped, Resumed, Saved, SaveFailed, decode_report, encode

logger = logging.getLogger("torchloom")
MOST = 100
"""News kept at most; past it the oldest is dropped."""
MAX_TEXT = 2000
MAX_NAME = 255
MAX_NAMES = 100
News = Saved | SaveFailed | Resumed | Regrouped | Healed | Discarded


class Outbox:
    """Filled by any thread, emptied by the link's.

    A life that is not welcomed yet may have to take another name, and what it said under the old one is not believed.
    So what was stored before the welcome is kept as well, to be said again (`unsay`).
    """

    def __init__(self) -> None:
        self.dropped = 0
        """News that nobody will ever hear."""
        self._waiting: dict[int, News] = {}
        self._count = 0
        self._stored = 0
        """The number of the last one that the server has."""
        self._lock = threading.Lock()

    def put(self, news: News) -> None:
        """One more to tell. Never waits; what the weaver could not read is left out, with a warning."""
        try:
            news = fitting(news)
            decode_report(encode(news))
        except (msgspec.MsgspecError, TypeError, ValueError, AttributeError) as error:
            logger.warning("torchLoom: %s cannot be told: %s", type(news).__name__, error)
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
            logger.warning("torchLoom: the weaver is not there to be told the news; %d forgotten", self.dropped)

    def first(self) -> tuple[int, News] | None:
        """What is to be said next, with its number."""
        with self._lock:
            return next(((number, news) for number, news in self._waiting.items() if number > self._stored), None)

    def stored(self, number: int, sure: bool) -> None:
        """The server has this one; `sure` if it stays true of this life."""
        with self._lock:
            self._stored = max(self._stored, number)
            if sure:
                self._waiting = {later: news for later, news in self._waiting.items() if later > self._stored}

    def unsay(self) -> None:
        """What was said is not believed: it is to be said again."""
        with self._lock:
            self._stored = 0

    async def empty(self, say: Callable[[int, News], Awaitable[bool]], sure: Callable[[], bool]) -> bool:
        """Say what waits, in order; whether all of it was stored."""
        while (following := self.first()) is not None:
            number, news = following
            if not await say(number, news):
                return False
            self.stored(number, sure())
        return True


def fitting(news: News) -> News:
    """The same within the bounds of a report: texts are shortened, and file names that are no text made readable."""
    texts: dict[str, Any] = {
        name: _text(value) for name in news.__struct_fields__ if isinstance(value := getattr(news, name), str)
    }
    if isinstance(news, Resumed):
        some = list(news.rejected.items())[:MAX_NAMES]
        texts["rejected"] = {_text(name, MAX_NAME): _text(why) for name, why in some}
    return replace(news, **texts)


def _text(text: str, most: int = MAX_TEXT) -> str:
    return text.encode("utf-8", "replace").decode()[:most]  # lone surrogates have no UTF-8

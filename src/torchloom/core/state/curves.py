"""A rank's history in bounded memory: when it is full, neighbours are merged and the spacing doubles."""

from __future__ import annotations

from torchloom.protocol.views import Point


class Curve:
    """Points in order of time, at most `capacity`, evenly spaced but for the newest, which is always there."""

    __slots__ = ("_extra", "_offered", "_points", "capacity", "stride")

    def __init__(self, capacity: int) -> None:
        assert capacity >= 2
        self.capacity = capacity
        self.stride = 1
        """One of this number of offered points is kept."""
        self._offered = 0
        self._extra = False
        """The newest is between two kept points, and the next one replaces it."""
        self._points: list[Point] = []

    def add(self, point: Point) -> None:
        if self._points and point.at <= self._points[-1].at:
            return  # read again after a restart, or a clock that went back
        if self._extra:
            self._points.pop()
        self._points.append(point)
        self._extra = self._offered % self.stride != 0
        self._offered += 1
        if len(self._points) > self.capacity:
            self._thin()

    def _thin(self) -> None:
        newest = self._points[-1]
        self._points = (self._points[:-1] if self._extra else self._points)[::2]
        self.stride *= 2
        self._extra = self._points[-1] is not newest
        if self._extra:
            self._points.append(newest)

    @property
    def points(self) -> tuple[Point, ...]:
        return tuple(self._points)

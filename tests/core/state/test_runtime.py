"""A rank's history in bounded memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchloom.core.state.runtime import Curve
from torchloom.protocol.views import Point


def at(n: int) -> Point:
    return Point(float(n), n, 1.0 / (n + 1), 10.0)


@given(st.integers(2, 20), st.integers(0, 500))
def test_a_curve_is_bounded_ordered_and_ends_with_the_newest(capacity: int, count: int) -> None:
    curve = Curve(capacity)
    for n in range(count):
        curve.add(at(n))
    points = curve.points
    assert len(points) <= capacity
    assert list(points) == sorted(points)
    if count:
        assert points[-1] == at(count - 1)
        assert points[0] == at(0)
        assert len(points) >= min(count, capacity // 2)
    gaps = {b.at - a.at for a, b in zip(points, points[1:-1], strict=False)}
    assert len(gaps) <= 1


def test_points_read_again_after_a_restart_are_not_doubled() -> None:
    curve = Curve(10)
    for n in (1, 2, 3, 2, 3, 4):
        curve.add(at(n))
    assert [p.step for p in curve.points] == [1, 2, 3, 4]

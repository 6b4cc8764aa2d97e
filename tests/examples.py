"""How many examples a test draws."""

from __future__ import annotations

from hypothesis import settings

ALWAYS = 0.3
"""The share of them that `make test` tries, always the same ones; `make campaign` draws all, and others each time."""


def examples(count: int, **more: object) -> settings:
    """Settings of a test that draws so many."""
    drawn = settings.get_current_profile_name() == "drawn"
    return settings(max_examples=count if drawn else max(1, round(ALWAYS * count)), **more)  # type: ignore[arg-type]

"""What the weaver answers, as people read it: its sentence, then what each rank had to say."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torchloom.messages import Done, RankId
from torchloom.views.tables import Screen, clean

_NAMED = 4
"""Ranks named in a heading before the rest is only counted."""


def answer(done: Done, screen: Screen) -> list[str]:
    lines = [clean(done.text)]
    named = set(re.split(r"[\s,;]+", done.text))
    lines += [f"  {clean(str(replica))}" for replica in done.replicas if str(replica) not in named]
    for text, ranks in by_text(done).items():
        said = text.splitlines()
        if len(said) <= 1:
            lines.append(f"  {clean(names(ranks))}: {clean(text)}")
        else:
            lines += ["", screen.paint(f"── {clean(names(ranks))}", "bold"), *map(clean, said)]
    return lines


def by_text(done: Done) -> dict[str, list[RankId]]:
    """Ranks that said the same stand together, in the order in which it was said first."""
    grouped: dict[str, list[RankId]] = {}
    for rank, text in done.results:
        grouped.setdefault(text.strip("\n"), []).append(rank)
    return grouped


def names(ranks: Sequence[RankId]) -> str:
    shown = ", ".join(map(str, ranks[:_NAMED]))
    return shown if len(ranks) <= _NAMED else f"{shown} and {len(ranks) - _NAMED:,} more"

"""What the weaver answers, as people read it: its sentence, then what each rank had to say."""

from __future__ import annotations

import re

from msgspec.structs import replace

from torchloom.protocol.ids import RankId
from torchloom.protocol.operator import Done, No
from torchloom.protocol.phrase import Phrase
from torchloom.views.format.tables import Screen, clean
from torchloom.views.listings import moved
from torchloom.views.wording.phrases import names, render

NAMED = 4
"""Ranks named in a heading before the rest is only counted."""


def answer(done: Done, screen: Screen) -> list[str]:
    text = render(done.text)
    lines = [clean(text)]
    if done.values:
        lines.append(f"  {clean(moved('set', done.values, done.before, done.over))}")
    if done.overwrites:
        lines.append(f"  it overwrites {clean(', '.join(done.overwrites))}")
    named = set(re.split(r"[\s,;]+", text))
    lines += [f"  {clean(str(replica))}" for replica in done.replicas if str(replica) not in named]
    for text, ranks in by_text(done).items():
        text_lines = text.splitlines()
        if len(text_lines) <= 1:
            lines.append(f"  {clean(names(ranks, NAMED))}: {clean(text)}")
        else:
            lines += ["", screen.paint(f"── {clean(names(ranks, NAMED))}", "bold"), *map(clean, text_lines)]
    return lines


def rendered(refusal: No) -> No:
    """As it is sent: a sentence for people, and its code for programs."""
    code = refusal.why.code if isinstance(refusal.why, Phrase) else refusal.code
    return replace(refusal, why=render(refusal.why), hint=render(refusal.hint), code=code)


def by_text(done: Done) -> dict[str, list[RankId]]:
    """Ranks that said the same stand together, in the order in which it was said first."""
    grouped: dict[str, list[RankId]] = {}
    for rank, text in done.results:
        grouped.setdefault(text.strip("\n"), []).append(rank)
    return grouped

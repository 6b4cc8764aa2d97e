"""Why: an incident told to a person. What happened and when, who is to blame, how that is known, what was decided and
done about it, how it ended, and what it cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchloom.core.detect.kinds_and_responses import HANGS
from torchloom.protocol.views import Goodput, IncidentView, MarkView
from torchloom.views.format.numbers import ago, clock, duration
from torchloom.views.format.tables import Screen, clean, cut, wrapped
from torchloom.views.job_runs import goodput
from torchloom.views.listings import incidents, name_of, short
from torchloom.views.wording.incident_templates import ODD_ONE_OUT

_LABEL = 10
_LINES = 20
"""Of one piece of evidence: the last it said matters most."""
_OTHERS = 10
_DOING = 150


def incident(view: IncidentView, now: float, screen: Screen) -> list[str]:
    """One incident, as a short story."""
    story = _Story(screen)
    story.title(view)
    story.part("when", [_when(view, now)])
    story.part("blame", [_blame(view)])
    story.part("evidence", _evidence(view.evidence))
    story.part("decided", [view.decision])
    story.part("because", [] if view.what.endswith(view.reason) or view.reason == short(view) else [view.reason])
    story.part("done", [f"{clock(at, now)}  {text}" for at, text in view.history], hanging=len(clock(now, now)) + 2)
    story.part("outcome", [view.outcome or ("it is not over" if view.closed is None else "")])
    story.part("cost", [_cost(view)])
    return story.lines


def job(
    name: str,
    views: Sequence[IncidentView],
    doing: str,
    spent: Goodput | None,
    now: float,
    screen: Screen,
    marks: Sequence[MarkView] = (),
) -> list[str]:
    """What a job does, where its time went, what operators marked, its newest incident (one that is open, if there is
    any), and the others."""
    story = _Story(screen)
    story.part("job", [cut(doing, _DOING)])  # the reason of an end is shown again below
    story.part("goodput", [goodput(spent)] if spent is not None else [])
    story.part("marks", [f"{clock(mark.at, now)}  {mark.text}" for mark in marks], hanging=len(clock(now, now)) + 2)
    newest = newest_first(views)
    if not newest:
        return [*story.lines, *([""] if story.lines else []), f"nothing went wrong with {clean(name)}"]
    lines = [*story.lines, "", *incident(newest[0], now, screen)]
    others = newest[1:]
    if others:
        lines += ["", *incidents(others[:_OTHERS], now, screen)]
    if len(others) > _OTHERS:
        lines.append(screen.paint(f"… and {len(others) - _OTHERS} more (`loom incidents --job {name}`)", "dim"))
    return lines


def newest_first(views: Iterable[IncidentView]) -> list[IncidentView]:
    """In the order of how much they matter: open ones first, then by age."""
    return sorted(views, key=lambda view: (view.closed is not None, -view.opened))


class _Story:
    """Paragraphs with a word in front that says what each is about, within the width of the screen."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self.lines: list[str] = []

    def title(self, view: IncidentView) -> None:
        about = view.job or name_of(view.about)
        state = "open" if view.closed is None else f"over after {duration(view.closed - view.opened)}"
        head = " · ".join(clean(word) for word in (view.id, view.kind, about, state) if word)
        self.lines.append(self.screen.paint(head, "dim" if view.closed is not None else "red"))
        for line in self._wrapped(clean(short(view)), 0, 0):
            self.lines.append(self.screen.paint(line, "bold"))

    def part(self, label: str, texts: Iterable[str], hanging: int = 0) -> None:
        """Nothing at all if there is nothing to say."""
        first = True
        for text in texts:
            if not text:
                continue
            odd = ODD_ONE_OUT in text
            indent = len(text) - len(text.lstrip(" "))
            for line in self._wrapped(clean(text), _LABEL, hanging or indent + 2):
                head = self.screen.paint(label.ljust(_LABEL), "dim") if first else " " * _LABEL
                self.lines.append(head + self.screen.paint(line, "yellow" if odd else ""))
                first = False

    def _wrapped(self, text: str, taken: int, hanging: int) -> list[str]:
        width = None if self.screen.width is None else max(20, self.screen.width - taken)
        return wrapped(text, width, hanging)


def _when(view: IncidentView, now: float) -> str:
    began = f"{clock(view.opened, now)}, {ago(view.opened, now)}"
    if view.closed is None:
        return began
    return f"{began}; over at {clock(view.closed, now)}, after {duration(view.closed - view.opened)}"


def _blame(view: IncidentView) -> str:
    """The rank or thing that it began with."""
    about = view.about
    if (rank := about.rank) is not None:
        return f"rank {rank.rank} of {rank.job}" + (f", replica {rank.replica}" if rank.replica != "main" else "")
    if about.run and not about.part:
        return "no rank in particular"
    if about.part == "agent":
        return f"the agent on {about.node}"
    if view.kind in HANGS:
        return "several ranks, named above" if view.culprits else "no rank stands out"
    if about.device:
        return f"device {about.device}"
    return "the job as a whole" if name_of(about) == view.job else name_of(about)


def _evidence(texts: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for text in texts:
        text_lines = text.expandtabs(4).rstrip().split("\n")
        if len(text_lines) > _LINES:
            lines.append(f"… {len(text_lines) - _LINES} lines before (-o json has them)")
        lines += text_lines[-_LINES:]
    return lines


def _cost(view: IncidentView) -> str:
    parts = []
    if view.lost_seconds is not None:
        parts.append(f"{duration(view.lost_seconds)} from its first sign until all ranks ran again")
    if view.lost_steps is not None:
        steps = "no step" if not view.lost_steps else f"{view.lost_steps:,} step{'s' if view.lost_steps != 1 else ''}"
        parts.append(f"{steps} to be done again")
    return ", ".join(parts)

"""One screen: is the control plane well, what trains, how far, how fast, and what went wrong last."""

from __future__ import annotations

from torchloom.protocol.views import ClusterView, IncidentView, PlaneView
from torchloom.views import listings
from torchloom.views.format.numbers import ago, duration
from torchloom.views.format.tables import Screen, clean, cut, wrapped

_LEAST_RANKS = 5
"""Ranks shown on even the lowest terminal."""


def status(view: ClusterView, screen: Screen, waits: str = "", *, ended_too: bool = False) -> list[str]:
    """The screen; `waits` is what the only job on it waits for before it can begin. The ranks of jobs that have ended
    are only counted, unless they are wanted too."""
    now = view.plane.now
    lines = plane(view.plane, screen)
    tail = incidents(view, screen)
    waits_lines = wrapped(clean(waits), screen.width, 2) if waits else []
    if not view.jobs and not view.ranks:
        nothing = "nothing trains here yet: call torchloom.attach() in a training script"
        return [*lines, "", *(waits_lines or [nothing]), *tail]
    if waits:
        tail = ["", *waits_lines, *tail]
    lines += ["", *listings.jobs(view.jobs, now, screen)]
    over = set() if ended_too else {job.job for job in view.jobs if job.ended is not None}
    ranks = [rank for rank in view.ranks if rank.rank.job not in over]
    ended = len(view.ranks) - len(ranks)
    shown = listings.ranks(ranks, now, screen) if ranks else []
    if screen.height is not None:
        rest = len(lines) + len(tail) + 4 + bool(ended)
        room = max(_LEAST_RANKS, screen.height - rest) + 1  # one for the head of the table
        shown = shown[:room]
    if shown:
        lines += ["", *shown]
    hidden = view.total_ranks - ended - max(0, len(shown) - 1)
    if hidden > 0:
        lines.append(screen.paint(f"… and {hidden:,} more ranks (`loom status --all` shows them)", "dim"))
    if ended:
        count = f"{ended:,} rank{'' if ended == 1 else 's'}"
        lines.append(screen.paint(f"left out: {count} of jobs that ended (`loom status --all` shows them)", "dim"))
    return lines + tail


def plane(view: PlaneView, screen: Screen) -> list[str]:
    """The control plane's own health, worst first."""
    word, style = ("in trouble", "red") if view.trouble else ("healthy", "green")
    facts = (
        f"weaver {view.weaver}, term {view.term}, up {duration(view.now - view.began)}, "
        f"log at {view.log_seq:,}, torchLoom {view.version}{f', {view.server}' if view.server else ''}"
    )
    room = None if screen.width is None else screen.width - len("control plane ") - len(word) - 3
    lines = [f"control plane {screen.paint(word, style)} · {cut(clean(facts), room)}"]
    notes = []
    if view.trouble:
        notes.append((f"trouble: {view.trouble}", "red"))
    if not view.advisories:
        notes.append(("the server does not report deaths: a dead rank is noticed by its silence only", "yellow"))
    if view.ingress:
        notes.append((f"alerts are taken at {view.ingress}", "dim"))
    elif view.ingress_trouble:
        notes.append((view.ingress_trouble, "yellow"))
    lines += [screen.paint(cut(clean(text), screen.width), style) for text, style in notes]
    if view.refused:
        total = sum(view.refused.values())
        reasons = ", ".join(f"{clean(reason)} {count:,}" for reason, count in sorted(view.refused.items()))
        text_lines = wrapped(f"refused {total:,} messages: {reasons}", screen.width, 2)
        lines += [screen.paint(line, "yellow") for line in text_lines]
    return lines


def incidents(view: ClusterView, screen: Screen) -> list[str]:
    """How many are open, and the newest one whole."""
    if not view.incidents:
        return ["", screen.paint("no incidents", "dim")]
    open_ones = sum(incident.closed is None for incident in view.incidents)
    newest = view.incidents[0]
    head = f"last incident {newest.id}, {ago(newest.opened, view.plane.now)}; {open_ones} open"
    return ["", screen.paint(head, "yellow" if open_ones else "dim"), *incident_lines(newest, screen)]


def incident_lines(incident: IncidentView, screen: Screen) -> list[str]:
    """One incident in a few lines: what, then what was decided and why, then how it ended."""
    texts = [f"  {listings.name_of(incident.about)}: {incident.what}"]
    if incident.decision:
        texts.append(f"  decided: {incident.decision}" + (f" ({incident.reason})" if incident.reason else ""))
    if incident.outcome:
        texts.append(f"  outcome: {incident.outcome}")
    return [line for text in texts for line in wrapped(clean(text), screen.width, 4)]

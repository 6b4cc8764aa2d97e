"""What stands in an incident, in few words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from torchloom.protocol.incident_records import About
from torchloom.protocol.views import IncidentView

_UUID_HEAD = re.compile(r"[A-Z]+-[0-9a-f]{8}(?=(-[0-9a-f]{4}){3}-[0-9a-f]{12}$)")


def name_of(about: About) -> str:
    """What an incident is about, by its name."""
    return str(about.rank) if about.rank is not None else about.run or about.job or about.device or about.node


def short(incident: IncidentView) -> str:
    """What went wrong, without the name of the job; why ranks were ended, if they were, says more."""
    if incident.stopped and incident.reason:
        return incident.reason
    return incident.what if incident.about.device else incident.short or incident.what


def short_devices(names: Iterable[str]) -> dict[str, str]:
    """For each name of a device that holds a uuid, what is enough to tell it from the others: `GPU-307a982d`."""
    heads = {name: name[: found.end()] for name in set(names) if (found := _UUID_HEAD.match(name))}
    shared = Counter(heads.values())
    return {name: head for name, head in heads.items() if shared[head] == 1}

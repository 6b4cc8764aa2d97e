"""What stands in an incident, in few words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from torchloom.core.policy import MEANING
from torchloom.core.stopping import ELSEWHERE, GIVEN_UP
from torchloom.messages import IncidentView

_BRIEF = {
    **{sentence: response for response, sentence in MEANING.items()},
    GIVEN_UP: "given up",
    ELSEWHERE: "started elsewhere",
    "reported": "report",
    "if it lasts ": "after ",
}
_UUID_HEAD = re.compile(r"[A-Z]+-[0-9a-f]{8}(?=(-[0-9a-f]{4}){3}-[0-9a-f]{12}$)")
_LONGEST_FIRST = sorted(_BRIEF, key=len, reverse=True)


def short(incident: IncidentView) -> str:
    """What went wrong, without the name of the job; why ranks were ended, if they were, says more."""
    if incident.stopped and incident.reason:
        return incident.reason
    return incident.what.removeprefix(f"{incident.job}: ")


def in_words_of_rules(text: str) -> str:
    """With what is done named as in a rule: `after 180 s: stacks, then restart`."""
    for sentence in _LONGEST_FIRST:
        text = text.replace(sentence, _BRIEF[sentence])
    return text


def short_devices(names: Iterable[str]) -> dict[str, str]:
    """For each name of a device that holds a uuid, what is enough to tell it from the others: `GPU-307a982d`."""
    heads = {name: name[: found.end()] for name in set(names) if (found := _UUID_HEAD.match(name))}
    shared = Counter(heads.values())
    return {name: head for name, head in heads.items() if shared[head] == 1}


def brief(decision: str) -> str:
    """The gist of a decision."""
    return in_words_of_rules(decision).partition(";")[0]

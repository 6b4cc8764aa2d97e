"""What stands in an incident, in few words."""

from __future__ import annotations

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


def brief(decision: str) -> str:
    """The gist of a decision."""
    return in_words_of_rules(decision).partition(";")[0]

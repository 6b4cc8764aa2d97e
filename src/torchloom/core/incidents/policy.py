"""What is done when something is wrong: a table, per job changed by its own rules.

What may be only a suspicion is reported and nothing more, unless the job's owner says otherwise. What stops a training
for good (a crash, a rank that is frozen or hangs, a device that failed) leads to a restart from the newest checkpoint
that verifies. The stacks of all ranks are taken of everyone that hangs, whatever the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from torchloom.protocol.job import EventKind, Response, Rule, Task
from torchloom.protocol.phrase import Phrase, phrase

DEFAULTS: Mapping[EventKind, Rule] = {
    rule.on: rule
    for rule in (
        Rule(on="crash", do=("restart",)),
        Rule(on="hang", do=("restart",)),
        Rule(on="frozen", do=("restart",)),
        Rule(on="held", do=("restart",)),
        Rule(on="straggler", do=("report",)),
        Rule(on="not_finite", do=("report",)),
        Rule(on="loss_spike", do=("report",)),
        Rule(on="gradient", do=("report",)),
        Rule(on="starved", do=("report",)),
        Rule(on="slowdown", do=("report",)),
        Rule(on="memory", do=("report",)),
        Rule(on="overdue", do=("report",)),
        Rule(on="device", do=("evict",), limit=5),  # an alert that comes and goes must not end a job each time
        Rule(on="device_warning", do=("report",)),
    )
}
assert set(DEFAULTS) == set(get_args(EventKind))
HANGS: frozenset[str] = frozenset({"hang", "frozen", "held"})
"""What a rank may go on from by itself."""
ENDING = frozenset({"restart", "evict", "rollback"})
"""Responses after which nothing of the attempt is left."""


def rule_for(task: Task | None, kind: EventKind) -> Rule:
    """The job's own rule for this, or the default."""
    own = next((rule for rule in reversed(task.policy) if rule.on == kind), None) if task is not None else None
    return own or DEFAULTS[kind]


def planned(*do: Response) -> Phrase:
    """What an incident says was decided: these, one after the other."""
    return phrase("responses", do=do)

"""The response to each kind of trouble: the defaults of the registry, changed by the rules of a job.

By default what may be a false alarm is only reported. What stops a training permanently (a crash, a rank that is frozen
or hangs, a device that failed) leads to a restart from the newest valid checkpoint. When ranks hang, the stacks of all
ranks are captured under any policy.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchloom.core.detect.kinds_and_responses import KINDS
from torchloom.protocol.job_spec import EventKind, Response, Rule, Task
from torchloom.protocol.phrase import Phrase, phrase

DEFAULTS: Mapping[EventKind, Rule] = {name: Rule(on=name, do=kind.do, limit=kind.limit) for name, kind in KINDS.items()}
ENDING = frozenset({"restart", "evict", "rollback"})
"""Responses after which nothing of the attempt is left."""


def rule_for(task: Task | None, kind: EventKind) -> Rule:
    """The job's own rule for this, or the default. What only a newer weaver detects is reported."""
    own = next((rule for rule in reversed(task.policy) if rule.on == kind), None) if task is not None else None
    return own or DEFAULTS.get(kind) or Rule(on=kind, do=("report",))


def planned(*do: Response) -> Phrase:
    """What an incident says was decided: these, one after the other."""
    return phrase("responses", do=do)

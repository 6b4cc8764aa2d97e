"""Runs and their attempts, told as sentences."""

from __future__ import annotations

from torchloom.protocol.incident_records import ResponseBegan, ResponseWent
from torchloom.protocol.run_records import (
    AttemptBegan,
    AttemptEnded,
    AttemptLaunched,
    AttemptPaused,
    AttemptRunning,
    AttemptStopping,
    NodeDrained,
    ReplicaDrained,
    RunEnded,
    RunSubmitted,
)
from torchloom.views.wording.phrases import render

RunRecord = (
    RunSubmitted
    | AttemptBegan
    | AttemptLaunched
    | AttemptRunning
    | AttemptPaused
    | AttemptStopping
    | ResponseBegan
    | ResponseWent
    | AttemptEnded
    | RunEnded
    | ReplicaDrained
    | NodeDrained
)

AFTER = {
    "restart": "then started again",
    "fail": "and given up",
    "cancel": "as asked",
    "done": "for there is nothing more to do",
}
"""What becomes of a run whose attempt is ended."""


def run_sentence(record: RunRecord) -> str:
    match record:
        case RunSubmitted(job=job, task=task, operator=operator):
            who = f" by {operator}" if operator else ""
            count = task.per_node * task.nodes
            return f"Job {job} submitted{who}: {' '.join(task.argv)[:200]} on {count} rank{'s' if count != 1 else ''}"
        case AttemptBegan(job=job, places=places):
            nodes = ", ".join(dict.fromkeys(place.node for place in places))
            return f"Job {job} is placed: {len(places)} rank{'s' if len(places) != 1 else ''} on {nodes}"
        case AttemptLaunched(job=job, heals=True):
            return f"Job {job} starts and heals from the others"
        case AttemptLaunched(job=job, resume=resume, resume_step=step, rejected=rejected):
            at = f" (step {step:,})" if step is not None else ""
            source = f"from {resume}{at}" if resume else "from the beginning"
            damaged = ", ".join(f"{name} ({why})" for name, why in rejected.items())
            return f"Job {job} starts {source}" + (f"; passed over: {damaged}" if damaged else "")
        case AttemptRunning(job=job, warm=warm, why_cold=why):
            how = f", {warm} warm" if warm else ""
            return f"Job {job} runs{how}" + (f"; started cold: {render(why)}" if why else "")
        case AttemptPaused(job=job, held=held):
            return f"Job {job} {'is paused' if held else 'goes on'}"
        case AttemptStopping(job=job, reason=reason, next_action=next_action):
            return f"Job {job} is ended, {AFTER[next_action]}: {render(reason)}"
        case ResponseBegan(job=job, incident=incident, do=do, reason=reason):
            why = f" ({render(reason)})" if reason else ""
            return f"The policy of {job} acts on {incident}{why}: {', then '.join(do)}"
        case ResponseWent(job=job, left=left):
            return f"The policy of {job} goes on: {', then '.join(left)}" if left else f"The policy of {job} has acted"
        case AttemptEnded(job=job, wait_seconds=wait):
            return f"No process of {job} is left" + (f"; it starts again in {wait:g} s" if wait else "")
        case RunEnded(job=job, phase=phase, reason=reason):
            return f"Job {job} is {phase}" + (f": {render(reason)}" if reason else "")
        case ReplicaDrained(job=job, drained=drained, operator=operator):
            who = f" ({operator})" if operator else ""
            return (
                f"{job} is to leave at the end of a step, and to stay away{who}"
                if drained
                else f"{job} may come back{who}"
            )
        case NodeDrained(node=node, drained=drained, operator=operator):
            who = f" ({operator})" if operator else ""
            return f"Nothing more is started on {node}{who}" if drained else f"{node} may be used again{who}"

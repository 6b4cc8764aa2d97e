"""The pages on incidents: how each kind is found, and the responses. The tables are the ones the weaver uses."""

from __future__ import annotations

from docs.markdown import code, fenced, table
from torchloom.core.detect.kinds_and_responses import KINDS
from torchloom.core.incidents import circuit_breaker
from torchloom.core.incidents.findings import STACKS_SECONDS
from torchloom.core.incidents.rule_lookup import DEFAULTS
from torchloom.job.policy_syntax import FORM, written
from torchloom.protocol.job_spec import EventKind
from torchloom.settings import Settings
from torchloom.views.format.numbers import delay
from torchloom.views.policy import patience
from torchloom.views.wording.templates import RESPONSES


def detection() -> list[str]:
    settings = Settings()
    lines = [
        "# What can go wrong, and how it is found",
        "",
        "Each kind opens an incident. `loom incidents` lists them. `loom why JOB` explains the newest one of a job: "
        "its evidence, what was decided and why, what was done, and what it cost. The [policy](policies.md) decides "
        "the response. The variables named here are explained under [settings](settings.md); the weaver reads them "
        "when it starts.",
        "",
        *table(
            ("event", "what it is", "by default"),
            ((f"[{code(event)}](#{event})", KINDS[event].explanation, _default(event, settings)) for event in DEFAULTS),
        ),
        "",
        "A pause of the weaver, or a lost connection of the weaver, never counts against a rank: afterwards every "
        "timer starts again. A rank that is paused (`loom pause`) is not expected to make steps.",
    ]
    for event, kind in KINDS.items():
        lines += ["", f"## {event}", "", f"{kind.explanation[0].upper()}{kind.explanation[1:]}. {kind.how}", ""]
        if kind.settings:
            names = ", ".join(code(f"TORCHLOOM_{name.upper()}") for name in kind.settings)
            lines += [f"Tuned by {names}.", ""]
        lines.append(f"By default: {_default(event, settings)}.")
    return lines


def _default(event: EventKind, settings: Settings) -> str:
    rule = DEFAULTS[event]
    after = patience(rule, settings)
    return "+".join(rule.do) + (f" after {delay(after)}" if after else "")


EXAMPLES = (
    ("hang=stacks+restart@30", "respond to a hang after 30 s instead of the time in the settings"),
    ("hang=report", "never end the job because of a hang"),
    ("crash=report", "do not restart after a crash: the job has failed"),
    ("not_finite=rollback,back=2,skip", "resume from the second checkpoint before it, and skip the batches since"),
    ("loss_spike=rollback,limit=2", "at most twice within the restart window of the job, then only report"),
    ("memory=checkpoint+restart", "save while there is memory left, then restart"),
    ("straggler=stacks", "capture the stacks of all ranks when one of them is slow"),
    ("device=report", "leave the job where it is when its device is reported broken"),
)
JOB_FILE = """\
script = "train.py"
nproc_per_node = 8
checkpoint_dir = "runs/mnist"

[policy]
hang = "stacks+restart@30"
not_finite = "rollback,back=2,skip,limit=3"
memory = "checkpoint+restart"
dry_run = true            # remove this line when you have seen what the policy would do"""


def policies() -> list[str]:
    settings = Settings()
    return [
        "# Policies: what is done when something goes wrong",
        "",
        "A policy is a table with the responses to each [kind of incident](detection.md), in order. By default "
        "torchLoom only reports what may be a false alarm, unless the job says otherwise. `loom policy` prints the "
        "default table, `loom policy JOB` the table of a job with its changes.",
        "",
        "## By default",
        "",
        *table(
            ("event", "what it is", "responses", "after", "limit"),
            (
                (
                    f"[{code(event)}](detection.md#{event})",
                    KINDS[event].explanation,
                    " + ".join(map(code, rule.do)),
                    f"{patience(rule, settings):g} s" if patience(rule, settings) else "at once",
                    "none" if rule.limit is None else str(rule.limit),
                )
                for event, rule in DEFAULTS.items()
            ),
        ),
        "",
        "`--max-restarts` within `--restart-window` limits all restarts: a job that has used up its restarts fails, "
        "and so does a job that fails in the same way twice without a further step.",
        "",
        "## Responses",
        "",
        *table(
            ("response", "what happens"),
            ((code(word), f"{text[0].upper()}{text[1:]}.") for word, text in RESPONSES.items()),
        ),
        "",
        "torchLoom carries out the responses one after the other. After `checkpoint` the next response waits until "
        "the checkpoint is written, at most one minute. After a crash there are no ranks left to ask: the rule for "
        "`crash` only decides whether the job is restarted. `restart`, `evict` and `rollback` end all ranks, so no "
        "response can follow them. torchLoom acts only on jobs that it started; incidents in other jobs are "
        "reported. If a restart because of a hang did not help, the next one waits thirty times as long. A hang "
        "alone never makes a job fail.",
        "",
        "## What a stopped rank costs",
        "",
        f"By default, when a rank has been stopped for {settings.frozen_act_seconds:g} s, all ranks restart from the "
        "newest valid checkpoint. If no checkpoint is known (none was reported, and there is no `--checkpoint-dir`), "
        f"the job would start from the beginning, so torchLoom waits {settings.hang_act_seconds:g} s. SIGSTOP and "
        "Ctrl-Z stop a process. A debugger does too, but that does not count. So either:",
        "",
        "- write checkpoints: use `torchloom.Checkpoints` in the script, or `--checkpoint-dir` if the script writes "
        "its own;",
        "- or allow more time: `--on frozen=restart@600`, or `--on frozen=report` to never restart.",
        "",
        "If all ranks of a job are stopped at once, or its only rank is, somebody may have done it on purpose. "
        f"torchLoom then waits {settings.hang_act_seconds:g} s, unless a rule says otherwise. `loom pause JOB` pauses "
        "training for as long as you like and never opens an incident.",
        "",
        "## Writing rules",
        "",
        "On the command line of `loom run` and `loom submit`, use `--on`, which may be repeated:",
        "",
        *fenced("", [FORM]),
        "",
        "- `@SECONDS`: how long a hanging, frozen or held rank is tolerated. torchLoom waits up to "
        f"{STACKS_SECONDS:g} s longer if the stacks are not captured yet. It responds to the other kinds as soon as it "
        "finds them.",
        "- `limit=N`: respond at most N times within the restart window of the job, then only report.",
        "- `back=N`: roll back to the N-th checkpoint before the incident; the default is 1.",
        "- `skip`: after a rollback, skip the batches of the steps that led to the incident (the script must use "
        "`batches()`).",
        "",
        *table(("rule", "meaning"), ((code(rule), meaning) for rule, meaning in EXAMPLES)),
        "",
        *fenced("sh", ["loom run --on hang=stacks+restart@30 --on crash=report train.py"]),
        "",
        "In a job file, use a table:",
        "",
        *fenced("toml", JOB_FILE.splitlines()),
        "",
        "A rule replaces the default for its event, and an option replaces the rule in the file. Two options for one "
        "event are an error, because it is not clear which one is meant.",
        "",
        "## Trying it first",
        "",
        "With `--dry-run-policy`, or `dry_run = true` under `[policy]`, torchLoom does not respond: each incident "
        "shows under *decided* what the response would have been. A crash still ends the attempt, because the ranks "
        "are gone, and the job is restarted within its limits.",
        "",
        "## Evicting a device",
        "",
        "`evict` is for a device that is broken while the job could run elsewhere. torchLoom marks the device of the "
        "rank at fault as failed, so that nothing is placed on it, ends all ranks, and restarts the job on the "
        "remaining devices from its newest valid checkpoint. The number of ranks stays the same, unless it was given "
        "as [MIN:MAX](check-node.md#starting-with-fewer).",
        "",
        "If there is not enough room without that device, the job waits. `loom status`, `loom why` and `loom wait` "
        "show what it waits for, and `loom why` counts the time as *waiting for room*. The job starts as soon as "
        "there is room: when someone runs `loom recover DEVICE`, when another job ends, or when another node joins "
        "with `loom agent`. An eviction because of a device or a straggler does not use up a restart.",
        "",
        "When a rule for an incident of a rank takes a device out of use, it is the device that torchLoom assigned "
        "to that rank. A rank that computes on the CPU has no assigned device, and neither has a rank of `loom run` "
        "on one machine, where the script chooses: there `drain` has no effect, and `evict` is a restart. `loom "
        "drain NODE` keeps new ranks off a machine. A CPU that is reported failed (`loom fail CPU-…`) keeps ranks "
        "off its node until it has recovered, if the node has no GPUs.",
        "",
        "## The circuit breaker",
        "",
        f"When more than {circuit_breaker.SHARE:.0%} of at least {circuit_breaker.AT_LEAST} ranks are lost within "
        f"{circuit_breaker.AT_ONCE:g} s and no agent saw one of them end, the cause is probably the "
        "network, the server or torchLoom, not the ranks. Then "
        "no policy acts: the incidents say so under *decided*, and a person should look. torchLoom still responds when "
        "an agent saw a process end.",
        "",
        "## What it costs",
        "",
        "`loom why JOB` and `loom status JOB -o json` show the goodput of a job that torchLoom started: which share "
        "of the time since it was submitted was productive, and what took the rest. Of a job under torchft it is the "
        "mean of its replicas.",
        "",
        *table(
            ("cause", "seconds in which"),
            (
                (code("waiting"), "there was no room for its ranks"),
                (code("starting"), "an attempt was starting, and no incident had preceded it"),
                ("a kind of event", "no step was made because of it: from its first sign until all ranks ran again"),
                (code("node"), "the same for a node, or its agent, that was lost"),
                (code("redone"), "ranks ran, but the checkpoint of the next attempt did not contain their work"),
                (code("paused"), "all ranks were paused"),
                (code("moving"), "its ranks had to leave a node whose agent was leaving"),
                (code("ending"), "it was ending at somebody's request"),
                (code("other"), "it was ended for another reason"),
            ),
        ),
    ]


def rules() -> list[str]:
    """Every rule that these pages show, for a test that parses them."""
    return [rule for rule, _ in EXAMPLES] + [written(rule) for rule in DEFAULTS.values()]

"""The pages on trouble: how it is found, and what is done about it. The tables are those that the weaver goes by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from docs.markdown import code, fenced, table
from torchloom.core import brake
from torchloom.core.policy import DEFAULTS, MEANING
from torchloom.messages import EventKind
from torchloom.rules import FORM, written
from torchloom.settings import Settings
from torchloom.views.policy import EXPLAINED, patience


class Found(NamedTuple):
    """How one kind of trouble is found."""

    how: str
    settings: tuple[str, ...] = ()
    """By which it can be tuned."""


DETECTED: Mapping[EventKind, Found] = {
    "crash": Found(
        "Its agent sees the process end, with exit code or signal, and keeps the last it wrote. Whether the kernel "
        "killed it for want of memory is told apart. Of a job that torchLoom did not start, the server tells that the "
        "link closed, and after a grace the rank is called dead.",
        ("grace_seconds", "frozen_grace_seconds"),
    ),
    "hang": Found(
        "A rank makes no step for much longer than its own slow steps, and longer than any pause it is known to have "
        "come back from. The culprit is the one that its peers wait for: it finished fewer steps, or began fewer "
        "collectives. Ranks that wait for it are not blamed, and where all stand at the same place nobody is. The "
        'first steps, and phases that a script names (`phase("eval")`), have a longer limit. The stacks of all ranks '
        "are taken and put side by side.",
        ("hang_floor_seconds", "hang_factor", "first_step_seconds", "phase_seconds", "hang_act_seconds"),
    ),
    "frozen": Found(
        "The agent sees in the process table that the process is stopped (SIGSTOP). One that a debugger "
        "holds has somebody who looks after it, and is not.",
        ("frozen_seconds", "frozen_act_seconds"),
    ),
    "held": Found(
        "The process runs, but a thread of it that should get the interpreter many times a second does not: something "
        "holds the GIL. If it uses the processor meanwhile it is given more time.",
        ("held_seconds", "held_act_seconds", "busy_act_seconds"),
    ),
    "straggler": Found(
        "What a rank needs for its own work, without waiting for its peers, is compared with that of its peers. "
        "It must be slower by the factor and by clearly more than beats differ on this machine, in three quarters of "
        "the latest ones, and so in three looks on end. Where ranks compute on GPUs, waiting is queued there like the "
        "rest and is not known: stragglers are then not told.",
        ("straggler_factor", "straggler_beats"),
    ),
    "not_finite": Found("A loss or metric that was reported is NaN or infinite. It is over after some finite ones."),
    "loss_spike": Found(
        "The loss is further above its recent median than many times its usual spread, in several of the latest "
        "beats, or once very much further. A level that stays is the new one.",
        ("spike_factor",),
    ),
    "gradient": Found(
        "The same for a metric that is a gradient norm by its name (`grad_norm`, `gnorm`, …). A single overflow, which "
        "loss scaling skips, is none; several are.",
        ("spike_factor",),
    ),
    "starved": Found(
        "Most of a step is spent waiting for the next batch, over most of the latest beats.", ("starved_share",)
    ),
    "slowdown": Found(
        "Steps take longer than the same rank's used to, over most of the latest beats. A changed value or another "
        "batch size begins a new measure.",
        ("slowdown_factor",),
    ),
    "memory": Found(
        "The memory of a rank, or of its device, grows steadily, so that the machine would be full soon. Filling "
        "caches and a one-time growth are not taken for it.",
        ("memory_horizon_seconds",),
    ),
    "overdue": Found(
        "No checkpoint has come for several times the usual interval.",
        ("overdue_factor",),
    ),
    "device": Found(
        "A monitoring system, an agent (XID errors, uncorrected ECC errors) or a person with `loom fail` says that a "
        "device is broken. It is until everyone who said so takes it back, or a person says `loom recover`.",
    ),
    "device_warning": Found(
        "An agent or an alert says that a device is hot, throttled or losing memory rows.",
        ("device_temperature_celsius",),
    ),
}


def detection() -> list[str]:
    settings = Settings()
    lines = [
        "# What can go wrong, and how it is found",
        "",
        "Each is an incident: `loom incidents` lists them, `loom why JOB` tells the newest one of a job with its "
        "evidence, what was decided and why, what was done, and what it cost. What is done is a matter of the "
        "[policy](policies.md). The variables named here are explained under [settings](settings.md); they are read by "
        "the weaver when it starts.",
        "",
        *table(
            ("event", "what it is", "by default"),
            ((f"[{code(event)}](#{event})", EXPLAINED[event], _default(event, settings)) for event in DEFAULTS),
        ),
        "",
        "The weaver's own pause, or a lost connection of it, is never held against a rank: after it every clock begins "
        "anew. A rank that is paused (`loom pause`) is not expected to make steps.",
    ]
    for event, found in DETECTED.items():
        lines += ["", f"## {event}", "", f"{EXPLAINED[event][0].upper()}{EXPLAINED[event][1:]}. {found.how}", ""]
        if found.settings:
            names = ", ".join(code(f"TORCHLOOM_{name.upper()}") for name in found.settings)
            lines += [f"Tuned by {names}.", ""]
        lines.append(f"By default: {_default(event, settings)}.")
    return lines


def _default(event: EventKind, settings: Settings) -> str:
    rule = DEFAULTS[event]
    after = patience(rule, settings)
    return "+".join(rule.do) + (f" after {after:g} s" if after else "")


EXAMPLES = (
    ("hang=stacks+restart@30", "act on a hang after 30 s rather than as the settings say"),
    ("hang=report", "never end the job for a hang"),
    ("crash=report", "do not start again after a crash: the job has failed"),
    ("not_finite=rollback,back=2,skip", "go on from the second checkpoint before it, and leave out the batches since"),
    ("loss_spike=rollback,limit=2", "at most twice within the job's window of restarts, then only report"),
    ("memory=checkpoint+restart", "save while there is memory left, then start afresh"),
    ("straggler=stacks", "see where all ranks are when one of them is slow"),
    ("device=report", "leave the job where it is when its device is said to be broken"),
)
JOB_FILE = """\
script = "train.py"
nproc_per_node = 8
checkpoint_dir = "runs/mnist"

[policy]
hang = "stacks+restart@30"
not_finite = "rollback,back=2,skip,limit=3"
memory = "checkpoint+restart"
dry_run = true            # leave this away when you have seen what it would do"""


def policies() -> list[str]:
    settings = Settings()
    return [
        "# Policies: what is done when something goes wrong",
        "",
        "A policy is a table: for each [kind of trouble](detection.md), what is done about it, in order. What may be "
        "only a suspicion is reported and nothing more, unless the job says otherwise. `loom policy` prints the table, "
        "`loom policy JOB` that of a job, with what it has changed.",
        "",
        "## By default",
        "",
        *table(
            ("event", "what it is", "responses", "after", "limit"),
            (
                (
                    f"[{code(event)}](detection.md#{event})",
                    EXPLAINED[event],
                    " + ".join(map(code, rule.do)),
                    f"{patience(rule, settings):g} s" if patience(rule, settings) else "at once",
                    "none" if rule.limit is None else str(rule.limit),
                )
                for event, rule in DEFAULTS.items()
            ),
        ),
        "",
        "`--max-restarts` within `--restart-window` limits them all: a job that has used up its restarts is given up, "
        "and so is one that fails in the same way twice without a step forward.",
        "",
        "## Responses",
        "",
        *table(
            ("response", "what happens"),
            ((code(word), f"{text[0].upper()}{text[1:]}.") for word, text in MEANING.items()),
        ),
        "",
        "They are done one after the other. After `checkpoint` the next waits until it is written, at most a minute. "
        "After a crash there is nothing left to ask or to look at: its rule says whether the job is started again. "
        "`restart`, `evict` and `rollback` end all ranks, so nothing can follow them. Only a job that torchLoom "
        "started is acted on; trouble in any other is reported. Where a restart for a hang did not help, thirty times "
        "as long is waited the next time, and a hang alone never ends a job.",
        "",
        "## What a stopped rank costs",
        "",
        f"By default a rank that has been stopped for {settings.frozen_act_seconds:g} s is given up, and all ranks "
        "start again from the newest valid checkpoint. Where no checkpoint is known of (none was told of, and there is "
        f"no `--checkpoint-dir`), the job would begin anew: then it has {settings.hang_act_seconds:g} s. SIGSTOP "
        "and Ctrl-Z stop a process; a debugger does too, but that is not held against it. So:",
        "",
        "- have checkpoints: `torchloom.Checkpoints` in the script, or `--checkpoint-dir` where the script writes its "
        "own;",
        "- or give the one who looks time: `--on frozen=restart@600`, and `--on frozen=report` to let it stand.",
        "",
        f"All ranks of a job stopped at once, or its only one, may be on purpose: they have "
        f"{settings.hang_act_seconds:g} s, unless a rule says otherwise. `loom pause JOB` holds training for as long "
        "as you like, and nothing is made of it.",
        "",
        "## Writing rules",
        "",
        "On the command line with `--on`, which may be repeated, for `loom run` and `loom submit`:",
        "",
        *fenced("", [FORM]),
        "",
        "- `@SECONDS`: how long a hang, a frozen or a held rank may last before anything is done. The others are acted "
        "on when they are found.",
        "- `limit=N`: at most so often within the job's window of restarts, then it is only reported.",
        "- `back=N`: a rollback goes back to the N-th checkpoint before the trouble; 1 if it is not given.",
        "- `skip`: after a rollback, the batches of the steps that led there are left out (the script asks for them "
        "with `batches()`).",
        "",
        *table(("rule", "meaning"), ((code(rule), meaning) for rule, meaning in EXAMPLES)),
        "",
        *fenced("sh", ["loom run --on hang=stacks+restart@30 --on crash=report train.py"]),
        "",
        "In a job file, a table:",
        "",
        *fenced("toml", JOB_FILE.splitlines()),
        "",
        "A rule takes the place of the default for its event, and an option that of the file's rule. Two options for "
        "one event are refused: which one is meant cannot be known.",
        "",
        "## Trying it first",
        "",
        "With `--dry-run-policy`, or `dry_run = true` under `[policy]`, nothing is done: each incident says what would "
        "have been, under *decided*. A crash still ends the attempt, since the ranks are gone, and the job is started "
        "again within its restarts.",
        "",
        "## Evicting a device",
        "",
        "`evict` is for a device that is broken while the job could go on elsewhere. The device of the rank that is to "
        "blame is marked as failed, so that nothing is placed there; all ranks end, and the job is started again on "
        "what is left, from its newest valid checkpoint. The number of ranks stays what it was, unless it was given as "
        "[MIN:MAX](check-node.md#starting-with-fewer).",
        "",
        "If there is not enough room without that device, the job waits. `loom status`, `loom why` and `loom wait` say "
        "for what, and `loom why` counts the time as *waiting for room*. It goes on by itself as soon as there is "
        "room: when someone says `loom recover DEVICE`, when another job ends, or when a further node joins with `loom "
        "agent`. An eviction uses up no restart.",
        "",
        "What a rule for trouble of a rank takes out of use is the device that torchLoom gave to that rank. One that "
        "computes on the CPU was given none, nor was one of `loom run` on one machine, where the script chooses: there "
        "`drain` takes nothing away, and `evict` is a restart. `loom drain NODE` keeps a machine free of ranks. A CPU "
        "that is said to have failed (`loom fail CPU-…`) keeps its node free of them where there are no GPUs, until it "
        "has recovered.",
        "",
        "## The brake",
        "",
        f"When more than {brake.SHARE:.0%} of at least {brake.AT_LEAST} ranks are lost within {brake.AT_ONCE:g} s and "
        "nobody saw one of them end, it is rather the network, the server or torchLoom itself than the ranks. Then no "
        "policy acts: the incidents say so under *decided*, and people are to look. What an agent has seen to end is "
        "acted on all the same.",
        "",
        "## What it costs",
        "",
        "`loom why JOB` and `loom status JOB -o json` tell the goodput of a job that torchLoom started: which share of "
        "the time since it was submitted was productive, and where the rest went.",
        "",
        *table(
            ("cause", "seconds in which"),
            (
                (code("waiting"), "there was no room for its ranks"),
                (code("starting"), "an attempt that nothing had gone wrong before was being started"),
                ("a kind of event", "no step was made because of it: from its first sign until all ranks ran again"),
                (code("node"), "the same for a node that was lost, or its agent"),
                (code("redone"), "ranks ran, but what they did was not in the checkpoint that the next attempt had"),
                (code("paused"), "all ranks were paused"),
                (code("moving"), "its ranks had to leave a node that was leaving"),
                (code("ending"), "it was ended because somebody had asked for it"),
                (code("other"), "it was ended for another reason"),
            ),
        ),
    ]


def rules() -> list[str]:
    """Every rule that these pages show, for a test that parses them."""
    return [rule for rule, _ in EXAMPLES] + [written(rule) for rule in DEFAULTS.values()]

"""The options of `loom run` and `loom submit` that say what is done when something goes wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchloom.cli import completion_names

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from torchloom.protocol.job import Task


def add_rules(verb: ArgumentParser) -> None:
    completion_names.with_names(
        verb.add_argument(
            "--on", action="append", default=[], metavar="RULE",
            help="Respond to a kind of incident: hang=stacks+restart@30, not_finite=rollback,back=2,skip,limit=3; may "
            "be repeated; `loom policy` lists the kinds, docs/policies.md explains",
        ),
        completion_names.complete_rule,
    )  # fmt: skip
    verb.add_argument("--dry-run-policy", action="store_true", help="Only report what the policy would do")


def with_rules(task: Task, args: Namespace) -> Task:
    """The task with what these options say; a rule takes the place of one for the same event."""
    from msgspec.structs import replace

    from torchloom.job.policy_syntax import rules

    own = {rule.on: rule for rule in (*task.policy, *rules(args.on))}
    return replace(
        task,
        policy=tuple(own.values()),
        dry_run=task.dry_run or args.dry_run_policy,
        check=task.check or bool(args.check),
    )

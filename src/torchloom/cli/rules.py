"""The options of `loom run` and `loom submit` that say what is done when something goes wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchloom.cli import names

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from torchloom.messages import Task


def add_rules(verb: ArgumentParser) -> None:
    names.with_names(
        verb.add_argument(
            "--on", action="append", default=[], metavar="RULE",
            help="what to do about an event: hang=stacks+restart@30, not_finite=rollback,back=2,skip,limit=3; may be "
            "repeated; `loom policy` lists events, docs/policies.md explains",
        ),
        names.complete_rule,
    )  # fmt: skip
    verb.add_argument("--dry-run-policy", action="store_true", help="only say what the policy would do")
    verb.add_argument(
        "--check", action="store_true", help="look at the nodes before ranks start there; leave out those not fit"
    )


def with_rules(task: Task, args: Namespace) -> Task:
    """The task with what these options say; a rule takes the place of one for the same event."""
    from msgspec.structs import replace

    from torchloom.rules import rules

    own = {rule.on: rule for rule in (*task.policy, *rules(args.on))}
    return replace(
        task,
        policy=tuple(own.values()),
        dry_run=task.dry_run or args.dry_run_policy,
        check=task.check or args.check,
    )

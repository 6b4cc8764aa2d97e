"""`loom lighthouse`: who trains together, for replicas of torchft."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchloom.lighthouse.options import add_options, read_options

if TYPE_CHECKING:
    from torchloom.cli.call import Call
    from torchloom.cli.verb_registry import Verbs


def add(verbs: Verbs) -> None:
    verb = verbs.add(
        "lighthouse", lighthouse, "run a lighthouse for torchft replicas that learns at once when one of them dies",
        "Replaces `torchft_lighthouse`: set TORCHFT_LIGHTHOUSE to its address. When a replica dies, the others do not\n"
        "wait for a heartbeat timeout. It keeps its quorums on disk, so that it can be killed and restarted. Runs\n"
        "until Ctrl-C. See docs/lighthouse.md.\n\n"
        "  loom lighthouse --job mnist --min-replicas 1\n"
        "  loom lighthouse --job mnist --bind 10.0.0.5:29510 --heartbeat-timeout-ms 5000",
    )  # fmt: skip
    add_options(verb)


def lighthouse(call: Call) -> int:
    from torchloom.lighthouse import main

    return main.run(call.settings, read_options(call.args))

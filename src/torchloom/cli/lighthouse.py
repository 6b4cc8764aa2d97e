"""`loom lighthouse`: who trains together, for replicas of torchft."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchloom.lighthouse.options import add_options, read_options

if TYPE_CHECKING:
    from torchloom.cli.call import Call
    from torchloom.cli.verbs import Verbs


def add(verbs: Verbs) -> None:
    verb = verbs.add(
        "lighthouse", lighthouse, "run a lighthouse for torchft's replicas that knows at once when one of them is gone",
        "Takes the place of `torchft_lighthouse`: replicas that have its address as TORCHFT_LIGHTHOUSE notice no\n"
        "difference until one dies, and then do not wait for a heartbeat timeout. It remembers its quorums when it is\n"
        "killed and started again. Until Ctrl-C. docs/lighthouse.md says more.\n\n"
        "  loom lighthouse --job mnist --min-replicas 1\n"
        "  loom lighthouse --job mnist --bind 10.0.0.5:29510 --heartbeat-timeout-ms 5000",
    )  # fmt: skip
    add_options(verb)


def lighthouse(call: Call) -> int:
    from torchloom.lighthouse import main

    return main.run(call.settings, read_options(call.args), lambda text: print(text, flush=True))

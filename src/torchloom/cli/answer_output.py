"""How the weaver's answer is printed, for every verb that has something done."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchloom.cli.call import Call
    from torchloom.protocol.operator import Done


def show(call: Call, done: Done) -> int:
    from torchloom.views.answers import answer

    if call.json:
        call.print_json(done)
    else:
        call.print(answer(done, call.screen))
    return 0

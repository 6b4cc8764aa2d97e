"""The verb that checks everything torchLoom stands on and says how to mend what is wrong."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchloom.cli.call import Call
    from torchloom.cli.doctor_checks.diagnosis import Finding
    from torchloom.cli.verb_registry import Verbs

_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


def add(verbs: Verbs) -> None:
    verbs.add(
        "doctor", doctor, "check this installation, with a remedy for each problem",
        "Python, torch, NATS, the state folder, the control plane, disk, GPUs, clock, limits, certificates, and\n"
        "the timeouts of torchft replicas.\n"
        "Exits with 1 if a check failed.\n\n  loom doctor", listing=True,
    )  # fmt: skip


def doctor(call: Call) -> int:
    from torchloom.bus.state_folder import StateFolder
    from torchloom.cli.doctor_checks import machine, plane, torchft_timeouts

    folder = StateFolder(call.settings.state_folder)
    findings = machine.examine(folder) + torchft_timeouts.examine(os.environ)
    findings += call.wait(plane.examine(call.settings, folder))
    failed = any(finding.level == "fail" for finding in findings)
    if call.json:
        call.print_json({"ok": not failed, "checks": findings})
    else:
        call.print(line for finding in findings for line in _lines(call, finding))
    return 1 if failed else 0


def _lines(call: Call, finding: Finding) -> list[str]:
    from torchloom.views.format.tables import clean

    mark = call.screen.paint(f"{finding.level:4}", _STYLES[finding.level])
    lines = [f"{mark}  {finding.check:<15} {clean(finding.found)}"]
    if finding.remedy:
        lines.append(f"{'':6}{'':15} → {finding.remedy}")
    return lines

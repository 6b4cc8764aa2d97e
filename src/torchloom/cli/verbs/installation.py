"""Verbs about this installation: doctor, settings."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from torchloom.cli.verb_call import Call, Verbs
from torchloom.settings import documentation
from torchloom.views.format.tables import Cell, Column, clean, table

if TYPE_CHECKING:
    from torchloom.cli.doctor_checks import Finding

_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


def add(verbs: Verbs) -> None:
    verbs["doctor"].define(doctor, "loom doctor")
    verb = verbs["settings"].define(settings, "TORCHLOOM_GRACE_SECONDS=5 loom settings")
    verb.add_flag("--markdown", help="Print a Markdown table")


def doctor(call: Call) -> int:
    """Python, torch, NATS, the state folder, the control plane, disk, GPUs, clock, limits, certificates, and
    the timeouts of torchft replicas.
    Exits with 1 if a check failed.
    """
    from torchloom.bus.state_folder import StateFolder
    from torchloom.cli import doctor_checks

    folder = StateFolder(call.settings.state_folder)
    findings = doctor_checks.examine_machine(folder) + doctor_checks.examine_torchft(os.environ)
    findings += call.wait(doctor_checks.examine_plane(call.settings, folder))
    failed = any(finding.level == "fail" for finding in findings)
    document = {"ok": not failed, "checks": findings}
    call.show(document, lambda: (line for finding in findings for line in _lines(call, finding)))
    return 1 if failed else 0


def _lines(call: Call, finding: Finding) -> list[str]:
    mark = call.screen.paint(f"{finding.level:4}", _STYLES[finding.level])
    lines = [f"{mark}  {finding.check:<15} {clean(finding.found)}"]
    if finding.remedy:
        lines.append(f"{'':6}{'':15} → {finding.remedy}")
    return lines


def settings(call: Call) -> int:
    documented = documentation()
    if call.args.markdown:
        call.print(["| variable | default | meaning |", "|---|---|---|"])
        call.print(f"| `{name}` | {f'`{default}`' if default else ''} | {text} |" for name, default, text in documented)
        return 0
    settings_shown: list[dict[str, str]] = []
    for name, default, meaning in documented:
        value = str(getattr(call.settings, name.removeprefix("TORCHLOOM_").lower()))
        settings_shown.append({"variable": name, "value": value, "default": default, "meaning": meaning})
    columns: list[Column[dict[str, str]]] = [
        Column("VARIABLE", lambda row: row["variable"]),
        Column("VALUE", _value, shrinks=True),
        Column("DEFAULT", lambda row: row["default"]),
        Column("MEANING", lambda row: row["meaning"], shrinks=True),
    ]
    return call.show(settings_shown, lambda: table(columns, settings_shown, call.screen))


def _value(row: dict[str, str]) -> Cell:
    return Cell(row["value"] or "-", "bold" if row["value"] != row["default"] else "")

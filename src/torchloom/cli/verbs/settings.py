"""The verb that shows every tunable, its value in force and its meaning."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchloom.cli.call import Call
    from torchloom.cli.verb_registry import Verbs


def add(verbs: Verbs) -> None:
    verb = verbs.add(
        "settings", settings, "list every setting: its variable, value in force, default and meaning",
        "  TORCHLOOM_GRACE_SECONDS=5 loom settings", listing=True,
    )  # fmt: skip
    verb.add_argument("--markdown", action="store_true", help="Print a Markdown table")


def settings(call: Call) -> int:
    from torchloom.settings import documentation
    from torchloom.views.format.tables import Cell, Column, table

    documented = documentation()
    if call.args.markdown:
        call.print(["| variable | default | meaning |", "|---|---|---|"])
        call.print(f"| `{name}` | {f'`{default}`' if default else ''} | {text} |" for name, default, text in documented)
        return 0
    settings_shown = []
    for name, default, meaning in documented:
        value = str(getattr(call.settings, name.removeprefix("TORCHLOOM_").lower()))
        settings_shown.append({"variable": name, "value": value, "default": default, "meaning": meaning})
    if call.json:
        call.print_json(settings_shown)
        return 0
    columns: list[Column[dict[str, str]]] = [
        Column("VARIABLE", lambda row: row["variable"]),
        Column(
            "VALUE",
            lambda row: Cell(row["value"] or "-", "bold" if row["value"] != row["default"] else ""),
            shrinks=True,
        ),
        Column("DEFAULT", lambda row: row["default"]),
        Column("MEANING", lambda row: row["meaning"], shrinks=True),
    ]
    call.print(table(columns, settings_shown, call.screen))
    return 0

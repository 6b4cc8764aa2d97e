"""The tables of the files of a trace in docs/workloads.md, from the columns in the code."""

from __future__ import annotations

from collections.abc import Mapping

from docs.markdown import code, table
from torchloom.traces.trace_rows import EVENTS, FILES, SHARED_COLUMNS, Column

BEGIN = "<!-- The tables between these lines are printed by `python -m docs.generate`. -->"
END = "<!-- end of the tables -->"


def with_tables(page: str) -> str:
    """The page with the tables as the code is now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + "\n".join([BEGIN, *_tables(), END]) + after


def _tables() -> list[str]:
    files = ((code(name), file.about, f"{file.most_mb} MB") for name, file in FILES.items())
    lines = ["", *table(("file", "content", "at most"), files), "", "Every file begins with these columns:", ""]
    lines += _columns(SHARED_COLUMNS)
    for name, file in FILES.items():
        lines += ["", f"#### {name}", "", *_columns(file.columns)]
    events = ((code(event), meaning) for event, meaning in EVENTS.items())
    return [*lines, "", "#### Events", "", *table(("event", "meaning"), events), ""]


def _columns(columns: Mapping[str, Column]) -> list[str]:
    return table(
        ("column", "unit", "meaning"), ((code(name), column.unit, column.meaning) for name, column in columns.items())
    )

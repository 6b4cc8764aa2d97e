"""The page about devices says what the code does."""

from __future__ import annotations

from pathlib import Path

from torchloom.agent.monitor.gpu_health import COOLER, UNTHROTTLED_SECONDS, XID_SECONDS, XIDS
from torchloom.agent.monitor.gpu_readings import STALE_SECONDS
from torchloom.settings import Settings
from torchloom.views.cluster_summary import READINGS_SHOWN

PAGE = (Path(__file__).parent.parent.parent / "docs" / "devices.md").read_text("utf-8")


def test_the_table_of_xids_is_the_one_in_use() -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ") and line[2].isdigit()]
    shown = {int(row[0]): (row[1], row[2]) for row in rows if row[0].isdigit()}
    assert shown == {number: (xid.meaning, "fatal" if xid.fatal else "warning") for number, xid in XIDS.items()}


def test_limits_are_those_in_use() -> None:
    for text in (
        f"{Settings.device_temperature_celsius:.0f} °C or more", f"{COOLER:.0f} °C below",
        f"none came for {XID_SECONDS / 60:.0f} min", f"ran freely for {UNTHROTTLED_SECONDS:.0f} s",
        f"does not answer for {STALE_SECONDS:.0f} s", f"more than {READINGS_SHOWN} readings",
    ):  # fmt: skip
        assert text in PAGE, text

"""What Alertmanager posts, as facts about devices. The bodies in tests/fixtures were captured from a real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchloom.errors import BadInput
from torchloom.integrations.alertmanager import MOST_ALERTS, Alarm, read
from torchloom.protocol.facts import DeviceFailed, DeviceRecovered, DeviceWarned

FIXTURES = Path(__file__).parent.parent / "fixtures"
GPU = "GPU-307a982d-bf2b-4cc3-64e3-aae456bf6a28"
FIRING = (FIXTURES / "alertmanager_firing.json").read_bytes()
RESOLVED = (FIXTURES / "alertmanager_resolved.json").read_bytes()


def post(*alerts: dict[str, Any]) -> bytes:
    return json.dumps({"version": "4", "alerts": alerts}).encode()


def alert(status: str = "firing", annotations: dict[str, str] | None = None, **labels: str) -> dict[str, Any]:
    return {
        "status": status,
        "labels": labels,
        "annotations": annotations or {},
        "startsAt": "2026-11-15T18:57:07.632Z",
        "fingerprint": "0123456789abcdef",
    }


def one(**labels: str) -> Alarm:
    (alarm,) = read(post(alert(**labels)))
    return alarm


def test_what_was_captured_firing_fails_the_gpu_it_names() -> None:
    (alarm,) = read(FIRING)
    assert alarm.about(alarm.uuid) == DeviceFailed(
        device=GPU,
        cause=f"GpuXid: XID 79 on {GPU}",
        source="Alertmanager (GpuXid)",
        alert="b1252eee80b0e499",
        began=1794769027.632,
    )


def test_what_was_captured_resolved_is_the_end_of_the_same_alert() -> None:
    (alarm,) = read(RESOLVED)
    fact = alarm.about(alarm.uuid)
    assert isinstance(fact, DeviceRecovered)
    (began,) = read(FIRING)
    assert (fact.device, fact.alert, fact.began) == (GPU, began.id, began.began)


def test_the_same_told_again_has_the_same_key_and_its_end_another() -> None:
    (first,), (again,), (end,) = read(FIRING), read(FIRING), read(RESOLVED)
    assert first.key == again.key != end.key


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        ({"severity": "critical"}, DeviceFailed),
        ({"severity": "CRITICAL"}, DeviceFailed),
        ({"severity": "warning"}, DeviceWarned),
        ({"severity": "info"}, None),
        ({"torchloom": "fail", "severity": "warning"}, DeviceFailed),
        ({"torchloom": "warn", "severity": "critical"}, DeviceWarned),
        ({"torchloom": "ignore", "severity": "critical"}, None),
        ({"torchloom": "perhaps", "severity": "critical"}, None),
        ({"alertname": "GpuLost"}, DeviceFailed),
        ({"alertname": "GpuTooHot"}, DeviceWarned),
        ({"alertname": "GpuLost", "severity": "info"}, None),
        ({"alertname": "Watchdog"}, None),
        ({}, None),
    ],
)
def test_how_bad_it_is(labels: dict[str, str], kind: type | None) -> None:
    found = [type(alarm.about(alarm.uuid)) for alarm in read(post(alert(UUID=GPU, **labels)))]
    assert found == ([] if kind is None else [kind])


def test_a_warning_ends_under_the_name_it_began_with() -> None:
    labels = {"alertname": "GpuTooHot", "UUID": GPU}
    hot, well = (read(post(alert(status, **labels)))[0].about(GPU) for status in ("firing", "resolved"))
    assert isinstance(hot, DeviceWarned)
    assert isinstance(well, DeviceWarned)
    assert hot.what == well.what == "GpuTooHot"
    assert (hot.over, well.over) == (False, True)


@pytest.mark.parametrize("label", ["UUID", "uuid", "gpu_uuid"])
def test_a_device_is_named_by_its_uuid(label: str) -> None:
    alarm = one(severity="critical", Hostname="node7", **{label: GPU})
    assert alarm.uuid == GPU
    assert alarm.hosts == ()


def test_an_alert_about_a_machine_names_it_the_surest_way_first() -> None:
    alarm = one(severity="critical", instance="10.0.0.7:9100", node="node7", Hostname="node7.example.org")
    assert (alarm.uuid, alarm.part) == ("", "")
    assert alarm.hosts == ("node7.example.org", "node7", "10.0.0.7:9100")


@pytest.mark.parametrize("label", ["gpu", "device", "pci_bus_id", "UUID"])
def test_a_part_of_a_machine_is_not_taken_for_the_whole(label: str) -> None:
    alarm = one(severity="critical", Hostname="node7", **{label: "nvidia 0"})
    assert (alarm.uuid, alarm.part, alarm.hosts) == ("", "", ())


def test_a_label_device_may_be_a_name_that_is_known() -> None:
    assert one(severity="critical", device="nvidia0").part == "nvidia0"


@pytest.mark.parametrize(
    ("annotations", "cause"),
    [
        ({"summary": "hot", "description": "very"}, "A: hot"),
        ({"description": "very"}, "A: very"),
        ({}, "A"),
        ({"summary": "x" * 4000}, "A: " + "x" * 1997),
    ],
)
def test_the_cause_is_what_the_annotations_say(annotations: dict[str, str], cause: str) -> None:
    body = post(alert(annotations=annotations, alertname="A", severity="critical", UUID=GPU))
    assert read(body)[0].cause == cause


def test_what_is_over_is_told_before_what_fires() -> None:
    body = post(
        alert("firing", severity="critical", UUID="GPU-1"), alert("resolved", severity="critical", UUID="GPU-2")
    )
    assert [alarm.uuid for alarm in read(body)] == ["GPU-2", "GPU-1"]


def test_alerts_without_a_fingerprint_are_told_apart_by_their_labels() -> None:
    bare = [alert(severity="critical", UUID=uuid) | {"fingerprint": ""} for uuid in ("GPU-1", "GPU-2", "GPU-1")]
    first, other, again = read(post(*bare))
    assert first.id == again.id != other.id


def test_unknown_fields_are_ignored_and_times_may_be_odd() -> None:
    body = {
        "version": "4",
        "news": [1],
        "alerts": [alert(severity="critical", UUID=GPU) | {"startsAt": "soon", "x": 1}],
    }
    assert read(json.dumps(body).encode())[0].began == 0.0
    nano = alert(severity="critical", UUID=GPU) | {"startsAt": "2026-11-15T20:57:07.632000001+02:00"}
    assert read(post(nano))[0].began == read(FIRING)[0].began


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"hello",
        b"[]",
        b"{}",
        b'{"version": "4"}',
        b'{"version": "3", "alerts": []}',
        b'{"version": "4", "alerts": [{}]}',
        b'{"version": "4", "alerts": [{"status": "smouldering"}]}',
        b'{"version": "4", "alerts": [{"status": "firing", "labels": {"UUID": 7}}]}',
        b'{"version": "4", "alerts": [{"status": "firing", "fingerprint": "a.b"}]}',
        b'{"version": "4", "alerts": [{"status": "firing", "labels": {"a": "%s"}}]}' % (b"x" * 5000),
        b'{"version": "\xff\xfe", "alerts": []}',
        b'{"a":' * 100_000,
        post(*[alert()] * (MOST_ALERTS + 1)),
    ],
)
def test_what_alertmanager_would_not_send_is_refused_whole(body: bytes) -> None:
    with pytest.raises(BadInput, match="Alertmanager"):
        read(body)


@given(st.binary(max_size=300))
def test_no_bytes_do_anything_but_be_refused(body: bytes) -> None:
    with pytest.raises(BadInput):
        read(b"\x00" + body)


@pytest.mark.parametrize(
    ("labels", "effect"),
    [
        ({"severity": "critical", "alertname": "NodeDiskFull"}, "warn"),
        ({"severity": "critical", "alertname": "GpuLost"}, "fail"),
        ({"torchloom": "fail", "alertname": "NodeDiskFull"}, "fail"),
        ({"severity": "critical", "alertname": "NodeDiskFull", "UUID": GPU}, "fail"),
    ],
)
def test_what_is_wrong_with_a_machine_is_no_failure_of_all_its_devices_unless_it_says_so(
    labels: dict[str, str], effect: str
) -> None:
    assert one(Hostname="node7", **labels).effect == effect

"""The rules and the receiver of docs/ are what Prometheus and Alertmanager take, and fire when they should."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from torchloom.agent.monitor.gpu_health import XIDS
from torchloom.integrations.alertmanager import BY_NAME

DOCS = Path(__file__).parent.parent.parent / "docs"
RULES = DOCS / "prometheus-rules.yaml"
GPU = 'UUID="GPU-1", gpu="0", Hostname="n1", instance="n1:9400"'
UP = {"series": 'up{instance="n1:9400"}', "values": "1x120"}


def tool(name: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    if shutil.which(name) is None:
        pytest.skip(f"{name} not installed (apt-get install prometheus prometheus-alertmanager)")
    return subprocess.run([name, *words], capture_output=True, text=True, check=False)


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def test_prometheus_takes_the_rules() -> None:
    checked = tool("promtool", "check", "rules", RULES)
    assert checked.returncode == 0, checked.stderr


def test_alertmanager_takes_the_receiver() -> None:
    checked = tool("amtool", "check-config", DOCS / "alertmanager.yaml")
    assert checked.returncode == 0, checked.stderr


def test_what_the_rules_say_is_what_their_names_mean_to_us() -> None:
    assert {rule["alert"]: rule["labels"]["torchloom"] for rule in rules()} == BY_NAME
    severity = {"fail": "critical", "warn": "warning"}
    assert all(rule["labels"]["severity"] == severity[rule["labels"]["torchloom"]] for rule in rules())


def test_an_alert_fails_a_device_for_the_xids_for_which_an_agent_does() -> None:
    named = {rule["alert"]: set(map(int, re.findall(r"XID_ERRORS == (\d+)", rule["expr"]))) for rule in rules()}
    assert named["GpuXid"] == {number for number, xid in XIDS.items() if xid.fatal}
    assert named["GpuXidWarning"] <= {number for number, xid in XIDS.items() if not xid.fatal}


def test_the_receiver_gets_exactly_those_alerts() -> None:
    config = yaml.safe_load((DOCS / "alertmanager.yaml").read_text())
    (route,) = config["route"]["routes"]
    assert route["matchers"] == ['torchloom=~"fail|warn"']
    (receiver,) = [one for one in config["receivers"] if one["name"] == route["receiver"]]
    (webhook,) = receiver["webhook_configs"]
    assert webhook["send_resolved"]
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/alertmanager", webhook["url"])


@pytest.mark.parametrize(
    ("series", "firing"),
    [
        ({"DCGM_FI_DEV_XID_ERRORS": "79x120"}, {"GpuXid"}),
        ({"DCGM_FI_DEV_XID_ERRORS": "0x120"}, set()),
        ({"DCGM_FI_DEV_XID_ERRORS": "31x120"}, set()),
        ({"DCGM_FI_DEV_XID_ERRORS": "94x120"}, {"GpuXidWarning"}),
        ({"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": "0x50 2x70"}, {"GpuEccDoubleBit"}),
        ({"DCGM_FI_DEV_ROW_REMAP_FAILURE": "1x120"}, {"GpuRowRemapFailed"}),
        ({"DCGM_FI_DEV_GPU_TEMP": "60x120"}, set()),
        ({"DCGM_FI_DEV_GPU_TEMP": "91x120"}, {"GpuTooHot"}),
        ({"DCGM_FI_DEV_GPU_TEMP": "60x20 _x100"}, {"GpuLost"}),
        ({'DCGM_FI_DEV_GPU_TEMP{pod="a"}': "60x20 _x100", 'DCGM_FI_DEV_GPU_TEMP{pod="b"}': "_x20 60x100"}, set()),
        ({"DCGM_FI_DEV_THERMAL_VIOLATION": "0+12000000x120"}, {"GpuThrottled"}),
        ({"DCGM_FI_DEV_THERMAL_VIOLATION": "5000x120"}, set()),
    ],
)
def test_a_rule_fires_when_it_should(tmp_path: Path, series: dict[str, str], firing: set[str]) -> None:
    """Two hours at a sample a minute; looked at in the end, when every alert has had its time."""
    samples = [UP]
    for name, values in series.items():
        metric, _, more = name.partition("{")
        samples.append({"series": f"{metric}{{{GPU}{', ' + more.strip('}') if more else ''}}}", "values": values})
    tests = []
    for rule in rules():
        expected = [_expected(rule, series)] if rule["alert"] in firing else []
        tests.append({"eval_time": "110m", "alertname": rule["alert"], "exp_alerts": expected})
    document = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": samples, "alert_rule_test": tests}],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(document))
    ran = tool("promtool", "test", "rules", tmp_path / "test.yaml")
    assert ran.returncode == 0, ran.stdout + ran.stderr


def _expected(rule: dict[str, Any], series: dict[str, str]) -> dict[str, Any]:
    labels = {"UUID": "GPU-1", "gpu": "0", "Hostname": "n1", "instance": "n1:9400"} | rule["labels"]
    value = re.search(r"(\d+)x\d+$", next(iter(series.values())))
    summary = rule["annotations"]["summary"].replace("{{ $labels.gpu }}", "0").replace("{{ $labels.Hostname }}", "n1")
    return {
        "exp_labels": labels,
        "exp_annotations": {"summary": summary.replace("{{ $value }}", value[1] if value else "")},
    }

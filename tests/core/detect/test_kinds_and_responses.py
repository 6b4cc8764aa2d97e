"""The registry of the kinds of trouble is complete, and every table that depends on a kind is derived from it."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest

import torchloom
from docs import generate
from tests.core.detect.beats import SETTINGS, beat
from torchloom.core.detect.detector import Block, Finding
from torchloom.core.detect.kinds_and_responses import DETECTORS, HANGS, KINDS, Kind
from torchloom.core.detect.rank_detectors import BLOCK, RankDetectors
from torchloom.core.incidents.rule_lookup import DEFAULTS, rule_for
from torchloom.job.policy_syntax import EVENTS
from torchloom.protocol.job_spec import EventKind, Rule
from torchloom.protocol.rank import Beat, StepTimes
from torchloom.settings import Settings
from torchloom.views.policy import policy
from torchloom.views.wording.incident_templates import INCIDENT_TEMPLATES
from torchloom.views.wording.templates import TEMPLATES

SOURCE = Path(torchloom.__file__).parent
EXPLANATION = 40
"""Characters that fit beside the other columns of `loom policy` on a terminal of 80."""


@pytest.mark.parametrize(("name", "kind"), KINDS.items(), ids=list(KINDS))
def test_a_row_is_complete(name: str, kind: Kind) -> None:
    assert msgspec.convert(name, EventKind) == name
    assert 0 < len(kind.explanation) <= EXPLANATION
    assert kind.how.endswith(".")
    assert set(kind.settings) <= {field.name for field in fields(Settings)}
    assert not kind.patience or kind.patience in kind.settings
    assert msgspec.convert(msgspec.to_builtins(DEFAULTS[name]), Rule) == DEFAULTS[name]


def test_every_table_names_every_kind_in_the_order_of_the_registry() -> None:
    names = list(KINDS)
    assert list(DEFAULTS) == names
    assert list(EVENTS) == names
    assert [row.event for row in policy(None, SETTINGS)] == names
    assert [row.explained for row in policy(None, SETTINGS)] == [kind.explanation for kind in KINDS.values()]
    for page in ("detection.md", "policies.md"):
        assert re.findall(r"^\| \[`(\w+)`\]\(\S*#\w+\) \|", generate.page(page), re.MULTILINE) == names


def test_what_lasts_is_responded_to_after_a_time_and_everything_else_at_once() -> None:
    assert HANGS == ("hang", "frozen", "held")
    assert {row.event for row in policy(None, SETTINGS) if row.after} == set(HANGS)


def test_every_finding_in_the_source_is_of_a_registered_kind() -> None:
    names = set()
    for path in (SOURCE / "core" / "detect").glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Finding":
                names |= {node.value for node in call.args[:1] if isinstance(node, ast.Constant)}
    assert len(names) > 4
    assert names <= set(KINDS)


def test_a_code_has_one_template() -> None:
    codes = [code for kind in KINDS.values() for code in kind.phrases]
    assert len(codes) == len(set(codes))
    assert not set(codes) & set(INCIDENT_TEMPLATES)
    assert all(TEMPLATES[code] == template for kind in KINDS.values() for code, template in kind.phrases.items())


class _Counter:
    """A detector that reports once it has taken in forty losses."""

    def __init__(self, _settings: Settings) -> None:
        self.losses: list[float] = []
        self.reported = False

    @property
    def due(self) -> bool:
        return len(self.losses) >= 40 and not self.reported

    def learn(self, block: Block) -> None:
        self.losses += [loss for loss in block.loss if loss is not None]

    def hear(self, beat: Beat, _times: StepTimes, _now: float) -> Finding | None:
        self.losses += [beat.loss] if beat.loss is not None else []
        if not self.due:
            return None
        self.reported = True
        return Finding("overdue", "forty", step=beat.step)


def test_a_registered_detector_takes_in_every_ordinary_loss_once_and_is_examined_when_due() -> None:
    detectors = RankDetectors(SETTINGS, [_Counter])
    beats = [beat(n, loss=float(n)) for n in range(100)]
    findings = [(n, one) for n, said in enumerate(beats) for one in detectors.hear(said, float(n))]
    [(number, finding)] = findings
    assert finding == Finding("overdue", "forty", step=10 * number)
    assert 40 <= number <= 40 + BLOCK
    (counter,) = detectors._registered
    assert isinstance(counter, _Counter)
    assert counter.losses == [float(n) for n in range(len(counter.losses))]
    assert len(counter.losses) >= 100 - BLOCK


def test_a_new_rank_runs_the_detectors_of_the_registry() -> None:
    assert len(RankDetectors(SETTINGS)._registered) == len(DETECTORS)


def test_a_kind_that_only_a_newer_weaver_detects_is_reported() -> None:
    assert rule_for(None, "from_the_future").do == ("report",)

"""Settings: read once, each with a default, a unit and a variable."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchloom.errors import BadSetting
from torchloom.settings import Settings, documentation


@pytest.mark.parametrize("name", ["TORCHLOOM_ADDR", "torchLoom_ADDR", "MARDUK_ADDR"])
def test_the_older_spellings_of_the_address_work_too(name: str) -> None:
    assert Settings.from_env({name: "nats://there:4222"}).addr == "nats://there:4222"


def test_the_newest_spelling_wins() -> None:
    env = {"MARDUK_ADDR": "nats://old:1", "torchLoom_ADDR": "nats://older:1", "TORCHLOOM_ADDR": "nats://new:1"}
    assert Settings.from_env(env).addr == "nats://new:1"


def test_an_empty_variable_is_no_variable() -> None:
    assert Settings.from_env({"TORCHLOOM_BEAT_SECONDS": "", "TORCHLOOM_ADDR": ""}) == Settings()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("TORCHLOOM_BEAT_SECONDS", "soon"),
        ("TORCHLOOM_BEAT_SECONDS", "-1"),
        ("TORCHLOOM_BEAT_SECONDS", "0"),
        ("TORCHLOOM_BEAT_SECONDS", "nan"),
        ("TORCHLOOM_BEAT_SECONDS", "inf"),
        ("TORCHLOOM_KEEP_ENDED_JOBS", "1.5"),
        ("TORCHLOOM_OFF", "maybe"),
    ],
)
def test_an_impossible_value_is_named(name: str, text: str) -> None:
    with pytest.raises(BadSetting, match=name):
        Settings.from_env({name: text})


def test_values_have_the_type_of_their_default() -> None:
    env = {"TORCHLOOM_OFF": "yes", "TORCHLOOM_CURVE_POINTS": "12", "TORCHLOOM_GRACE_SECONDS": "2"}
    settings = Settings.from_env(env)
    assert (settings.off, settings.curve_points, settings.grace_seconds) == (True, 12, 2.0)


def test_the_state_folder_is_found_the_same_way_by_everyone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert Settings().state_folder == tmp_path / "torchloom"
    assert Settings.from_env({"TORCHLOOM_STATE": "~/loom"}).state_folder == Path.home() / "loom"
    assert Settings().with_state("here").state_folder == Path.cwd() / "here"
    assert Settings(state="/elsewhere").with_state(None).state_folder == Path("/elsewhere")


def test_every_setting_is_explained() -> None:
    rows = documentation()
    assert len(rows) == len(Settings.__dataclass_fields__)
    assert all(len(meaning) > 10 for _, _, meaning in rows)

"""Verbs that show, against a real server: text, JSON with stable keys, pages, and names that are not known."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tests.cli.conftest import Loom
from tests.cli.responder import Responder
from tests.views.samples import GPU, NOW, assignment, cluster, device, incident, job, rank
from torchloom.bus.nats_server import EmbeddedServer
from torchloom.protocol.ids import RankId
from torchloom.protocol.operator import ReplicaDrained
from torchloom.protocol.views import MarkView, Point, QueryCluster, QueryCurves


def keys(struct: type[msgspec.Struct]) -> set[str]:
    return set(struct.__struct_fields__)


def decoded(at: Loom, *words: str) -> Any:
    ran = at(*words, "-o", "json")
    assert ran.code == 0, ran.err
    assert ran.out.count("\n") == 1, "one document on one line"
    return json.loads(ran.out)


def test_status_as_text_and_json(weaver: Responder, at: Loom) -> None:
    ran = at("status")
    assert ran.code == 0
    assert "control plane healthy" in ran.out
    assert "last incident i7" in ran.out
    view = decoded(at, "status")
    assert set(view) == {"is", *keys(type(weaver.view))}
    assert view["ranks"][1]["beat"] is None
    assert view["ranks"][0]["rank"] == {"job": "mnist", "replica": "hi", "rank": 0}
    assert set(view["jobs"][0]) == keys(type(weaver.view.jobs[0]))
    assert view["jobs"][0]["ended"] is None


@pytest.mark.parametrize("name", ["", "a.b", "*", "a" * 100_000])
@pytest.mark.parametrize("verb", ["status", "wait", "cancel --yes", "drain"])
def test_what_is_no_name_is_refused_in_words(weaver: Responder, at: Loom, verb: str, name: str) -> None:
    ran = at(*verb.split(), "--", name)
    assert ran.code == 2
    assert "names have 1 to 128 characters" in ran.err
    assert repr(name)[:20] in ran.err
    assert "is not a name" in ran.err
    assert len(ran.err) < 1200
    assert not weaver.looked
    assert not weaver.asked


def test_all_pages_are_gathered(weaver: Responder, at: Loom) -> None:
    weaver.view = cluster(ranks=tuple(rank(number=i) for i in range(2500)))
    view = decoded(at, "status")
    assert [r["rank"]["rank"] for r in view["ranks"]] == list(range(2500))
    assert [(look.offset, look.limit) for look in weaver.looked] == [(0, 1000), (1000, 1000), (2000, 500)]
    weaver.looked.clear()
    shown = at("status").out
    assert len(weaver.looked) == 1
    assert "1,500 more ranks" in shown
    assert "more ranks" not in at("status", "--all").out


def test_the_ranks_of_a_job_that_ended_are_shown_where_they_are_asked_for(weaver: Responder, at: Loom) -> None:
    old = job("old", phase="failed", ended=NOW - 900)
    weaver.view = cluster(jobs=(job(), old), ranks=(rank(), rank("old", "ho", 0, presence="dead")))
    assert "dead" not in at("status").out
    for words in (["--all"], ["old"]):
        assert "dead" in at("status", *words).out
    assert len(decoded(at, "status")["ranks"]) == 2


def test_a_rank_that_left_between_two_pages_does_not_make_it_wait_for_ever(weaver: Responder, at: Loom) -> None:
    weaver.view = cluster(ranks=tuple(rank(number=i) for i in range(1200)), total_ranks=1300)
    assert len(decoded(at, "status")["ranks"]) == 1200


def test_jobs_and_devices(weaver: Responder, at: Loom) -> None:
    assert at("jobs").out.splitlines()[1].split()[:3] == ["mnist", "running", "1/2"]
    assert decoded(at, "jobs")[0]["job"] == "mnist"
    assert weaver.looked[-1] == QueryCluster(limit=0)  # ranks are not asked for where they are not shown
    assert GPU in at("devices").out
    assert decoded(at, "devices")[0] == {
        "device": GPU, "node": "n1", "health": "ok", "since": NOW - 60, "cause": "", "replicas": [],
        "reading": None,
    }  # fmt: skip
    assert weaver.looked[-1] == QueryCluster(limit=300, readings=True)  # devices come with the ranks that use them
    weaver.view = cluster(jobs=(), devices=())
    assert (at("jobs").out, at("devices").out) == ("no jobs yet\n", "no devices yet\n")
    assert decoded(at, "jobs") == []


@pytest.fixture
def shared(weaver: Responder) -> Responder:
    weaver.view = cluster(
        ranks=(rank("mnist", "hi", 0), rank("mnist", "hi", 1), rank("bert", "hi", 0), rank("bert", "ho", 0)),
        assignments=(
            assignment("GPU-1", "mnist", "hi", 0), assignment("GPU-2", "mnist", "hi", 1, "n2"),
            assignment("GPU-1", "bert", "hi", 0), assignment("GPU-3", "bert", "ho", 0),
        ),
        devices=(device("GPU-1"), device("GPU-2", node="n2"), device("GPU-3")),
    )  # fmt: skip
    return weaver


def test_the_map_both_ways(shared: Responder, at: Loom) -> None:
    found = decoded(at, "map")
    assert found["devices"] == {"GPU-1": ["bert/hi", "mnist/hi"], "GPU-2": ["mnist/hi"], "GPU-3": ["bert/ho"]}
    assert found["replicas"] == {"bert/hi": ["GPU-1"], "bert/ho": ["GPU-3"], "mnist/hi": ["GPU-1", "GPU-2"]}
    assert decoded(at, "map", "--device", "GPU-1")["replicas"] == {"bert/hi": ["GPU-1"], "mnist/hi": ["GPU-1"]}
    assert decoded(at, "map", "--replica", "mnist/hi")["devices"] == {"GPU-1": ["mnist/hi"], "GPU-2": ["mnist/hi"]}
    assert decoded(at, "map", "--replica", "ho")["devices"] == {"GPU-3": ["bert/ho"]}
    assert decoded(at, "map", "--node", "n2")["devices"] == {"GPU-2": ["mnist/hi"]}
    assert decoded(at, "map", "--rank", "mnist/hi/1")["devices"] == {"GPU-2": ["mnist/hi"]}
    assert "bert/hi, mnist/hi" in at("map").out


@pytest.mark.parametrize(
    ("words", "what", "guess"),
    [
        (["map", "--device", "GPU-9"], "no device 'GPU-9'", "did you mean GPU-"),
        (["map", "--replica", "hii"], "no replica 'hii'", "did you mean hi"),
        (["map", "--replica", "mnist/ho"], "no replica 'mnist/ho'", "did you mean mnist/hi"),
        (["map", "--replica", "hi"], "exists in 2 jobs", "bert/hi or mnist/hi"),
        (["map", "--node", "n7"], "no node 'n7'", "did you mean n"),
        (["map", "--rank", "mnist/hi/7"], "no rank 'mnist/hi/7'", "did you mean mnist/hi/"),
        (["incidents", "--job", "mnits"], "no job 'mnits'", "did you mean mnist"),
        (["curves", "mnits"], "no job 'mnits'", "did you mean mnist"),
        (["curves", "mnist", "--replica", "hx"], "no replica", "did you mean mnist/hi"),
    ],
)
def test_unknown_names(shared: Responder, at: Loom, words: list[str], what: str, guess: str) -> None:
    ran = at(*words)
    assert (ran.code, ran.out) == (4, "")
    assert what in ran.err
    assert guess in ran.err


def test_incidents(weaver: Responder, at: Loom) -> None:
    weaver.view = cluster(
        jobs=(job("mnist"), job("bert")),
        incidents=(incident("i3", job="bert"), incident("i2", closed=NOW), incident("i1")),
    )
    assert [i["id"] for i in decoded(at, "incidents")] == ["i3", "i2", "i1"]
    assert [i["id"] for i in decoded(at, "incidents", "--open")] == ["i3", "i1"]
    assert [i["id"] for i in decoded(at, "incidents", "--job", "mnist", "--open")] == ["i1"]
    assert "i2" in at("incidents").out
    weaver.view = cluster(incidents=())
    assert at("incidents").out == "no incidents\n"


def test_curves(weaver: Responder, at: Loom) -> None:
    points = tuple(Point(NOW + i, i, float(i), None) for i in range(10))
    weaver.curves = tuple((RankId("mnist", "hi", i), points) for i in range(150))
    found = decoded(at, "curves", "mnist")
    assert len(found["curves"]) == 150
    assert found["curves"][0][1][3] == {"at": NOW + 3, "step": 3, "loss": 3.0, "samples_per_second": None}
    assert [look.offset for look in weaver.looked if isinstance(look, QueryCurves)] == [0, 100]
    shown = at("curves", "mnist").out
    assert "mnist/hi/0: 10 points" in shown
    assert "130 more ranks" in shown


def test_marks_stand_below_the_curves_where_they_were_made(weaver: Responder, at: Loom) -> None:
    points = tuple(Point(NOW + i, i, float(i), None) for i in range(10))
    weaver.curves = ((RankId("mnist", "hi", 0), points),)
    record = ReplicaDrained(job="mnist", drained=True)
    marks = tuple(MarkView(at=NOW + at, text=text, record=record) for at, text in ((3.5, "first"), (100, "second")))
    weaver.view = cluster(jobs=(msgspec.structs.replace(weaver.view.jobs[0], job="mnist", marks=marks),))
    shown = at("curves", "mnist").out.splitlines()
    (line,) = (line for line in shown if line.strip().startswith("marks"))
    (loss,) = (line for line in shown if line.strip().startswith("loss"))
    start = loss.index("▁")
    assert line[start:].rstrip() == "   1     2"
    assert [line[0] + line[-7:].split()[-1] for line in shown[-2:]] == ["1first", "2second"]
    found = decoded(at, "curves", "mnist")
    assert [mark["text"] for mark in found["marks"]] == ["first", "second"]


def test_a_weaver_that_is_away_is_told_apart_from_a_server_that_is(
    server: EmbeddedServer, at: Loom, loom: Loom, tmp_path: Any
) -> None:
    for words in (["status"], ["fail", "GPU-1"], ["register", "GPU-1", "hi"]):
        ran = at(*words)
        assert (ran.code, ran.out) == (3, "")
        assert "weaver does not answer" in ran.err
        assert "→" in ran.err
    server.stop()
    ran = at("status")
    assert ran.code == 3
    assert "no control plane answers" in ran.err
    assert "loom up" in ran.err

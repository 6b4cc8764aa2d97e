"""`loom events`: the past without the weaver, the present as it happens, over a killed server, nothing twice."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tests.cli.conftest import Loom
from tests.cli.responder import Responder
from tests.views.samples import GPU, LIFE, REPLICA, cluster
from torchloom.bus.nats_server import EmbeddedServer
from torchloom.protocol.ids import RankId
from torchloom.protocol.rank import Hello
from torchloom.protocol.records import InboxRead, JobBegan, RankJoined
from torchloom.settings import Settings

DEADLINE = 90.0


def told(out: str) -> list[str]:
    return [line.split("  ", 1)[1] for line in out.splitlines()]


def test_the_past_while_no_weaver_answers(weaver: Responder, at: Loom) -> None:
    hello = Hello(incarnation=LIFE, node="n1", pid=9, devices=(GPU,), world_size=2)
    weaver.append(JobBegan(job="mnist"), RankJoined(rank=RankId("mnist", REPLICA, 0), hello=hello))
    weaver.append(InboxRead(seq=5))
    weaver.append(JobBegan(job="bert"))
    weaver.looked.clear()
    registered = f"Registered device: {GPU} for replica_id: {REPLICA} (job mnist, rank 0 of 2, node n1, pid 9)"
    assert told(at("events").out) == ["Job mnist began", registered, "Job bert began"]
    assert told(at("events", "--job", "mnist").out) == ["Job mnist began", registered]
    assert not weaver.looked


def test_a_job_without_events_is_refused_with_a_guess(weaver: Responder, at: Loom) -> None:
    weaver.append(JobBegan(job="mnist"), JobBegan(job="bert"))
    ran = at("events", "--job", "mnits")
    assert (ran.code, ran.out) == (4, "")
    assert "did you mean mnist?" in ran.err
    assert at("events", "--job", "mnits", "-o", "json").code == 4
    assert at("events", "--job", "mnits", "--last", "0").code == 0


def test_the_last_ones_count_what_is_told_not_what_is_stored(weaver: Responder, at: Loom) -> None:
    for i in range(5):
        weaver.append(JobBegan(job=f"j{i}"))
    for i in range(30):
        weaver.append(InboxRead(seq=i))
    assert told(at("events", "--last", "2").out) == ["Job j3 began", "Job j4 began"]
    assert told(at("events", "--last", "1", "--job", "j0").out) == ["Job j0 began"]
    assert at("events", "--last", "0").out == ""


def test_json_is_one_object_per_line(weaver: Responder, at: Loom) -> None:
    weaver.append(JobBegan(job="a"), InboxRead(seq=1), JobBegan(job="b"))
    lines = [json.loads(line) for line in at("events", "-o", "json").out.splitlines()]
    assert lines == [
        {"seq": 1, "at": 1_800_000_000.0, "term": 1, "is": "JobBegan", "job": "a"},
        {"seq": 1, "at": 1_800_000_000.0, "term": 1, "is": "JobBegan", "job": "b"},
    ]


def test_an_entry_of_a_newer_weaver_does_not_hide_the_others(weaver: Responder, at: Loom) -> None:
    weaver.append(JobBegan(job="a"))
    weaver.do(weaver._append(b'{"term":1,"at":1.0,"records":[{"is":"Invented"}]}'))
    weaver.append(JobBegan(job="b"))
    ran = at("events")
    assert told(ran.out) == ["Job a began", "Job b began"]
    assert "entry 2" in ran.err


def test_no_log_yet(server: EmbeddedServer, at: Loom) -> None:
    ran = at("events")
    assert ran.code == 3
    assert "no stream" in ran.err


class Follower:
    """`loom events -f` as a process, its lines readable with a deadline."""

    def __init__(self, settings: Settings, *words: str) -> None:
        command = [sys.executable, "-m", "torchloom.cli.main", "--state", settings.state, "events", "-f", *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.out: queue.Queue[str] = queue.Queue()
        self.err: queue.Queue[str] = queue.Queue()
        for stream, lines in ((self.process.stdout, self.out), (self.process.stderr, self.err)):
            threading.Thread(target=self._read, args=(stream, lines), daemon=True).start()

    @staticmethod
    def _read(stream: object, lines: queue.Queue[str]) -> None:
        for line in stream:  # type: ignore[attr-defined]
            lines.put(line.rstrip("\n"))

    def next(self) -> str:
        return told(self.out.get(timeout=DEADLINE))[0]

    def until_said(self, text: str) -> None:
        end = time.monotonic() + DEADLINE
        while text not in self.err.get(timeout=max(0.01, end - time.monotonic())):
            pass


@pytest.fixture
def follower(weaver: Responder, settings: Settings) -> Iterator[Follower]:
    weaver.append(JobBegan(job="past"))
    follower = Follower(settings)
    yield follower
    follower.process.kill()
    follower.process.wait()


def test_following_shows_everything_once_and_ends_quietly(weaver: Responder, follower: Follower) -> None:
    assert follower.next() == "Job past began"
    for i in range(300):  # many at once: rings come faster than they are read
        weaver.append(JobBegan(job=f"j{i}"))
    assert [follower.next() for _ in range(300)] == [f"Job j{i} began" for i in range(300)]
    follower.process.send_signal(signal.SIGINT)
    assert follower.process.wait(DEADLINE) == 130
    assert follower.out.empty()
    assert "Traceback" not in "\n".join(follower.err.queue)


def test_a_job_that_has_no_events_yet_is_waited_for(weaver: Responder, settings: Settings) -> None:
    weaver.append(JobBegan(job="past"))
    follower = Follower(settings, "--job", "future")
    try:
        follower.until_said("'future'")
        weaver.append(JobBegan(job="future"))
        assert follower.next() == "Job future began"
    finally:
        follower.process.kill()
        follower.process.wait()


def test_a_ring_for_something_the_server_did_not_store_shows_nothing(weaver: Responder, follower: Follower) -> None:
    assert follower.next() == "Job past began"
    stale = {"Nats-Expected-Last-Sequence": "999"}

    async def refused() -> None:
        await weaver._client.publish("loom.log", b"{}", headers=stale)
        await weaver._client.flush()

    weaver.do(refused())
    weaver.append(JobBegan(job="stored"))
    assert follower.next() == "Job stored began"
    assert follower.err.empty()


def test_following_survives_a_killed_server(weaver: Responder, follower: Follower, server: EmbeddedServer) -> None:
    assert follower.next() == "Job past began"
    weaver.append(JobBegan(job="before"))
    assert follower.next() == "Job before began"
    assert server.process
    server.process.kill()
    server.process.wait()
    follower.until_said("the server is gone")
    server.start()
    follower.until_said("the server is back")
    weaver.append(JobBegan(job="after"))
    assert follower.next() == "Job after began"
    assert follower.out.empty()


def test_following_waits_for_a_log_that_is_not_there_yet(server: EmbeddedServer, settings: Settings) -> None:
    follower = Follower(settings)
    try:
        follower.until_said("no stream LOOM_LOG yet; waiting")
        with Responder(settings, cluster()) as weaver:
            weaver.append(JobBegan(job="first"))
            assert follower.next() == "Job first began"
    finally:
        follower.process.kill()
        follower.process.wait()

"""`loom annotate`: decided once for each request, kept with its job, and shown by events, why and curves."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

import torchloom
from tests.cli.conftest import Loom as Cli
from tests.cli.responder import Responder
from tests.core.loom import Loom
from tests.flow.plane import plane
from torchloom.core.state.cluster import KEEP_MARKS, State
from torchloom.errors import BadInput, BadState, Refused, Unreachable
from torchloom.protocol.ids import RankId
from torchloom.protocol.operator import Annotate, Done, JobAnnotated, No
from torchloom.protocol.phrase import phrase
from torchloom.protocol.views import PlaneView, QueryCluster
from torchloom.views.cluster_summary import picture

PLANE = PlaneView(weaver="host:1", term=1, began=0.0, now=0.0, log_seq=1, version="0")


def note(number: int = 1, text: str = "new data begins here", job: str = "mnist") -> Annotate:
    return Annotate(request=f"{number:032x}", job=job, text=text, operator="ann@box")


def test_the_step_of_a_note_is_that_of_the_ranks_that_still_train() -> None:
    loom = Loom()
    for number, step in ((0, 100), (1, 5000)):
        rank = RankId("mnist", "hi", number)
        loom.join(rank, world_size=2, link=f"s:{number}")
        loom.beat(rank, step=step)
    loom.leave(RankId("mnist", "hi", 0))
    [record] = loom.ask(note()).stored
    assert isinstance(record, JobAnnotated)
    assert record.step == 5000


def test_a_note_has_the_step_of_its_job_and_is_recorded_once_for_each_request() -> None:
    loom = Loom()
    loom.join()
    loom.beat(step=1500)
    decision = loom.ask(note())
    expected = JobAnnotated(
        job="mnist", text="new data begins here", request=note().request, step=1500, operator="ann@box"
    )
    assert decision.stored == (expected,)
    again = loom.ask(note())
    assert again.stored == ()
    assert again.answer == decision.answer
    assert len(loom.ask(note(2)).stored) == 1


def test_notes_survive_a_restart_and_a_snapshot() -> None:
    loom = Loom()
    loom.join()
    for number in range(KEEP_MARKS + 5):
        loom.ask(note(number))
    kept = loom.cluster.marks["mnist"]
    assert [mark.request for _, mark in kept] == [note(n).request for n in range(5, KEEP_MARKS + 5)]  # type: ignore[union-attr]
    assert loom.restarted().cluster.marks == loom.cluster.marks
    snapshot = msgspec.json.decode(msgspec.json.encode(loom.cluster.state()), type=State)
    assert Loom(state=snapshot).cluster.marks == loom.cluster.marks
    (job,) = picture(loom.cluster, PLANE, QueryCluster(job="mnist")).jobs
    assert len(job.marks) == KEEP_MARKS
    assert picture(loom.cluster, PLANE, QueryCluster()).jobs[0].marks == ()  # a view of all jobs stays small


def test_a_job_that_has_ended_accepts_notes_and_an_unknown_one_does_not() -> None:
    loom = Loom()
    loom.join()
    loom.leave()
    assert isinstance(loom.ask(note()).answer, Done)
    refusal = No(why=phrase("job_unknown", job="mnits"), hint=phrase("did_you_mean", name="mnist"))
    assert loom.ask(note(job="mnits")).answer == refusal


def test_what_the_client_sends_and_refuses(weaver: Responder) -> None:
    with torchloom.Client(weaver.settings, timeout=60) as loom:
        loom.annotate("mnist", "a\x1b[2Jb")
        sent = weaver.asked[-1]
        assert isinstance(sent, Annotate)
        assert (sent.job, sent.text, bool(sent.operator)) == ("mnist", "a\x1b[2Jb", True)
        for text in ("", "x" * 501):
            with pytest.raises(BadInput):
                loom.annotate("mnist", text)
    no = pytest.raises((Unreachable, BadState))
    with torchloom.Client(weaver.settings, role="viewer", timeout=0.5) as loom, no:
        loom.annotate("mnist", "viewers may not")
    assert len(weaver.asked) == 1


@pytest.mark.long
async def test_a_note_from_the_command_line_is_shown_by_events_why_and_curves(tmp_path: Path, loom: Cli) -> None:
    async with plane(tmp_path / "s") as up, torchloom.AsyncClient(up.settings, timeout=60) as client:

        async def run(*words: str) -> str:
            ran = await asyncio.to_thread(loom, "--state", str(tmp_path / "s"), *words)
            assert ran.code == 0, ran.err
            return ran.out

        up.start_rank()
        await up.until_beating(after=1)
        assert json.loads(await run("annotate", "job", "first\x1b note", "-o", "json"))["is"] == "Done"
        await client.annotate("job", "second note")
        marked = [record for record in await up.records() if isinstance(record, JobAnnotated)]
        assert [record.text for record in marked] == ["first\x1b note", "second note"]
        assert all(record.step for record in marked)
        for words in (("events", "--job", "job"), ("why", "job"), ("curves", "job")):
            shown = await run(*words)
            assert "\x1b" not in shown
            assert "first\N{REPLACEMENT CHARACTER} note" in shown
            assert "second note" in shown
        for verb in ("why", "curves"):
            marks = json.loads(await run(verb, "job", "-o", "json"))["marks"]
            assert [mark["record"]["text"] for mark in marks] == [record.text for record in marked]
        with pytest.raises(Refused) as refused:
            await client.annotate("jbo", "not here")
        assert refused.value.code == "job_unknown"
        ran = await asyncio.to_thread(loom, "--state", str(tmp_path / "s"), "annotate", "jbo", "not here")
        assert ran.code == 4
        assert "job" in ran.err.partition("→")[2]

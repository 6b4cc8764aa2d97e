"""Two threads meet at a step boundary: the training thread, and the link thread with what it received."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.threadlet.played import RANK, PlayedWeaver
from torchloom.protocol.codec import decode_reply
from torchloom.protocol.rank import (
    Applied,
    ChangeSpec,
    Hello,
    Muted,
    Order,
    Ordered,
    Propose,
    QueryStep,
    Reply,
    StepReport,
    Verdict,
    Welcome,
)
from torchloom.protocol.subjects import REPLY
from torchloom.settings import Settings
from torchloom.shared.incarnation import new_incarnation
from torchloom.shared.liveness_page import PAUSED
from torchloom.threadlet.changes.knob import make_knob
from torchloom.threadlet.changes.step_boundary import Port, StepBoundary
from torchloom.threadlet.metrics.meter import Meter
from torchloom.threadlet.threadlet import attach

LIFE = "1" * 24
SETTINGS = Settings(verdict_seconds=60.0, pause_orphan_seconds=0.2)


class PlayedPort(Port):
    """Stands for the link: keeps the replies, and does for the rest what a test wants."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.is_up: Callable[[], bool] = lambda: True
        self.on_resolve: Callable[[ChangeSpec], object] = lambda _: None

    @property
    def up(self) -> bool:  # type: ignore[override]
        return self.is_up()

    def reply(self, reply: Reply) -> None:
        self.replies.append(reply)

    def resolve(self, change: ChangeSpec) -> None:
        self.on_resolve(change)


class Rank:
    """A boundary with a training thread that steps without end, and notes the value it has at each step."""

    def __init__(self, settings: Settings = SETTINGS) -> None:
        self.meter = Meter()
        self.port = PlayedPort()
        self.answers = self.port.replies
        self.boundary = StepBoundary(LIFE, self.meter, settings)
        self.boundary.port = self.port
        self.knob = self.boundary.add(make_knob("x", 0.0, low=-100, high=100))
        self.values: dict[int, Any] = {}
        self._over = threading.Event()
        self._turn = threading.Lock()
        """While it is held, the training makes no step."""
        self._thread = threading.Thread(target=self._train, daemon=True)

    def _train(self) -> None:
        while not self._over.is_set() and not self.boundary.stopping:
            time.sleep(0.001)
            with self._turn:
                step = self.meter.step(None, None, None, {})
            if step >= self.boundary.participant.due_step:
                self.boundary.on_step(step)
            self.values[step] = self.knob.value

    def __enter__(self) -> Rank:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.boundary.set_paused(False)
        self.join()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()

    def promise(self, number: int = 1, by: int = 30, **about: Any) -> ChangeSpec:
        """A change `by` steps ahead that the rank has promised to apply. No step is made meanwhile."""
        with self._turn:
            change = self.ahead(number, by, **about)
            assert self.propose(change).ok
        return change

    def propose(self, change: ChangeSpec) -> Any:
        return self.boundary.propose(Propose(term=1, incarnation=LIFE, job="job", change=change))

    def tell(self, id: str, commit: bool = True) -> None:
        self.boundary.hear(Verdict(term=1, incarnation=LIFE, id=id, commit=commit))

    def ahead(self, number: int = 1, by: int = 30, **about: Any) -> ChangeSpec:
        about = about or {"values": {"x": float(number)}}
        return ChangeSpec(id=f"c{number}", number=number, step=self.meter.step_number + by, **about)


@pytest.fixture
def rank() -> Iterator[Rank]:
    with Rank() as found:
        yield found


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_committed_change_is_in_force_from_its_step_on_and_answered(rank: Rank) -> None:
    change = rank.promise()
    rank.tell("c1")
    until(lambda: rank.answers)
    assert rank.answers == [Applied(incarnation=LIFE, id="c1", step=change.step)]
    until(lambda: rank.meter.step_number > change.step + 5)
    assert {rank.values[step] for step in range(1, change.step)} == {0.0}
    assert {rank.values[step] for step in range(change.step, change.step + 5)} == {1.0}


def test_a_verdict_that_is_late_is_waited_for_at_the_step(rank: Rank) -> None:
    change = rank.promise(by=5)
    until(lambda: rank.meter.step_number == change.step)
    time.sleep(0.05)
    assert rank.meter.step_number == change.step
    rank.tell("c1")
    until(lambda: rank.answers)
    assert isinstance(rank.answers[0], Applied)
    assert rank.answers[0].step == change.step


def test_without_a_verdict_the_server_is_asked_again_and_again_then_training_goes_on_unchanged() -> None:
    with Rank(replace(SETTINGS, verdict_seconds=2.0)) as rank:
        asked: list[str] = []
        rank.port.on_resolve = lambda change: asked.append(change.id)
        change = rank.promise(by=5)
        until(lambda: rank.meter.step_number > change.step)
        assert len(asked) > 1  # after 0.1 s, and then every quarter of a second, if the machine lets it
        assert set(asked) == {"c1"}
        assert rank.values[change.step] == 0.0
        rank.tell("c1")
        time.sleep(0.02)
        assert rank.knob.value == 0.0  # too late: the others took it then


def test_what_the_server_says_is_obeyed(rank: Rank) -> None:
    rank.port.on_resolve = lambda change: rank.tell(change.id, commit=False)
    change = rank.promise(by=5)
    until(lambda: rank.meter.step_number > change.step + 2)
    assert rank.values[change.step] == 0.0
    assert rank.answers == []


def test_a_ramp_moves_at_every_step_and_ends_at_the_value(rank: Rank) -> None:
    change = rank.promise(values={"x": 10.0}, over=10)
    rank.tell("c1")
    until(lambda: rank.meter.step_number > change.step + 15)
    seen = [rank.values[change.step + n] for n in range(-1, 13)]
    assert seen == pytest.approx([0, *range(11), 10, 10])


def test_a_pause_holds_the_step_until_it_is_resumed_and_changes_are_taken_there(rank: Rank) -> None:
    pause = rank.promise(action="pause")
    rank.tell("c1")
    until(lambda: rank.boundary.participant.paused)
    time.sleep(0.03)
    assert rank.meter.step_number == pause.step
    change = ChangeSpec(id="c2", number=2, step=pause.step, values={"x": 7.0})
    assert rank.propose(change).ok
    rank.boundary.set_paused(False)  # overtakes the verdict
    time.sleep(0.03)
    assert rank.meter.step_number == pause.step
    rank.tell("c2")
    until(lambda: rank.meter.step_number > pause.step)
    assert rank.values[pause.step] == 7.0


def test_a_pause_is_shown_and_belongs_to_no_step(rank: Rank) -> None:
    pause = rank.promise(action="pause")
    rank.tell("c1")
    until(lambda: rank.meter.marks[PAUSED])
    assert rank.meter.idle_seconds() == 0
    rank.boundary.set_paused(False)
    until(lambda: rank.meter.step_number > pause.step)
    assert rank.meter.marks[PAUSED] == 0
    assert rank.meter.gaps.of(rank.meter.gaps.latest) > 0
    assert rank.meter.gaps.latest == pause.step + 1


def test_a_change_promised_in_the_last_moment_of_a_pause_is_taken_before_the_step_is_left(
    rank: Rank,
) -> None:
    pause = rank.promise(action="pause")
    promised: list[bool] = []

    def meanwhile() -> bool:
        """The training has just looked whether anything is due, and is about to look whether it is still paused."""
        if not promised:
            promised.append(rank.propose(ChangeSpec(id="c2", number=2, step=pause.step, values={"x": 7.0})).ok)
            rank.boundary.set_paused(False)
        return True

    rank.port.is_up = meanwhile
    rank.tell("c1")
    until(lambda: promised)
    time.sleep(0.03)
    assert promised == [True]
    assert rank.meter.step_number == pause.step
    rank.tell("c2")
    until(lambda: rank.meter.step_number > pause.step)
    assert rank.values[pause.step] == 7.0


def test_a_pause_that_nobody_can_end_ends_by_itself(rank: Rank) -> None:
    rank.port.is_up = lambda: False
    pause = rank.promise(action="pause")
    rank.tell("c1")
    until(lambda: rank.meter.step_number > pause.step + 1)
    assert not rank.boundary.participant.paused


def test_a_link_that_is_lost_for_a_moment_does_not_end_a_pause(rank: Rank) -> None:
    """However long the training has not looked: it saved a checkpoint, or its process was suspended."""
    looks: list[float] = []

    def is_up() -> bool:
        looks.append(time.monotonic())
        return len(looks) != 2

    rank.port.is_up = is_up
    pause = rank.promise(action="pause")
    rank.tell("c1")
    until(lambda: len(looks) >= 4)
    assert looks[1] - looks[0] > SETTINGS.pause_orphan_seconds
    assert rank.boundary.participant.paused
    assert rank.meter.step_number == pause.step


def test_stop_is_seen_after_its_step(rank: Rank) -> None:
    stop = rank.promise(action="stop")
    rank.tell("c1")
    rank.join()
    assert rank.boundary.stopping
    assert max(rank.values) == stop.step


def test_a_checkpoint_is_saved_at_its_step_and_its_path_answered_or_its_failure(rank: Rank) -> None:
    refused = rank.propose(rank.ahead(1, action="checkpoint"))
    assert "no function that saves" in refused.why

    def save(step: int) -> str:
        if rank.answers:
            raise OSError("disk full")
        return f"step-{step}.pt"

    rank.boundary.save = save
    steps = []
    for number in (2, 3):
        change = rank.promise(number, action="checkpoint")
        steps.append(change.step)
        rank.tell(change.id)
        until(lambda number=number: len(rank.answers) == number - 1)
    assert rank.answers == [
        Applied(incarnation=LIFE, id="c2", step=steps[0], result=f"step-{steps[0]}.pt"),
        Applied(incarnation=LIFE, id="c3", step=steps[1], ok=False, result="OSError: disk full"),
    ]


def test_a_value_that_the_rank_does_not_take_is_refused_before_anyone_takes_it(rank: Rank) -> None:
    assert "above 100" in rank.propose(rank.ahead(values={"x": 101.0})).why
    assert "no such knob" in rank.propose(rank.ahead(values={"y": 1.0})).why


def test_thousands_of_proposals_race_with_the_training_and_none_is_taken_at_another_step() -> None:
    with Rank() as rank:
        promised = {}
        for number in range(1, 400):
            change = rank.ahead(number % 100, by=number % 3, values={"x": float(number % 100)})
            change = ChangeSpec(id=f"c{number}", number=number, step=change.step, values=change.values)
            if rank.propose(change).ok:
                promised[number] = change.step
                rank.tell(change.id)
        until(lambda: len(rank.answers) == len(promised))
        taken = {int(answer.id[1:]): answer.step for answer in rank.answers if isinstance(answer, Applied)}
        assert taken == promised
        assert len(promised) > 50


def test_a_knob_made_after_the_welcome_has_the_value_in_force() -> None:
    boundary = StepBoundary(LIFE, Meter(), SETTINGS)
    boundary.welcome((ChangeSpec(id="c1", number=1, step=3, values={"late": 0.5}),))
    boundary.resume_at(10)
    assert boundary.add(make_knob("late", 0.1)).value == 0.5
    assert boundary.add(make_knob("other", 0.1)).value == 0.1


def test_a_second_knob_of_a_name_keeps_its_own_value_unless_that_was_changed() -> None:
    boundary = StepBoundary(LIFE, Meter(), SETTINGS)
    boundary.add(make_knob("lr", 0.1))
    assert boundary.add(make_knob("lr", 0.3)).value == 0.3  # attaching changes nothing in the training
    boundary.welcome((ChangeSpec(id="c1", number=1, step=1, values={"lr": 0.5}),))
    boundary.resume_at(1)
    assert boundary.add(make_knob("lr", 0.1)).value == 0.5


def test_the_state_goes_through_a_checkpoint() -> None:
    import json

    first = StepBoundary(LIFE, Meter(), SETTINGS)
    for name, value in {"x": 0.0, "betas": (0.9, 0.99)}.items():
        first.add(make_knob(name, value))
    changes = (
        ChangeSpec(id="c1", number=1, step=5, values={"x": 1.0, "betas": (0.8, 0.9)}),
        ChangeSpec(id="c2", number=2, step=50, values={"x": 2.0}),
    )
    first.welcome(changes)
    first.resume_at(10)
    state = json.loads(json.dumps(first.state_dict()))
    assert (state["step"], state["change"], state["knobs"]["x"]) == (10, 1, 1.0)

    second = StepBoundary("2" * 24, Meter(), SETTINGS)
    x, betas = second.add(make_knob("x", 0.0)), second.add(make_knob("betas", (0.9, 0.99)))
    second.welcome(changes)
    second.load_state_dict(state)
    assert (x.value, betas.value, second.participant.in_force) == (1.0, (0.8, 0.9), 1)
    second.on_step(50)
    assert (x.value, second.participant.in_force) == (2.0, 2)


# ── orders, over a real server ───────────────────────────────────────────────────────────────────────────────────────


async def test_an_order_heard_again_on_another_connection_is_not_done_again(
    weaver: PlayedWeaver, lively: Settings
) -> None:
    replies = await weaver.client.subscribe(REPLY.pattern())
    with attach("job", "hi", rank=0, settings=lively) as loom:
        hello = await weaver.report(Hello)
        resume = Order(term=1, incarnation=hello.incarnation, id="o1", verb="resume")
        await weaver.say(resume)
        first = decode_reply((await replies.next_msg(60)).data)
        assert isinstance(first, Ordered)

        loom._link._loop.call_soon_threadsafe(loom._link._loop.hang_up)  # type: ignore[union-attr]
        await weaver.report(Hello, 1)
        loom._boundary.set_paused(True)  # a pause that came after it
        await weaver.say(resume)
        assert decode_reply((await replies.next_msg(60)).data) == first
        assert loom._boundary.participant.paused
        loom._boundary.set_paused(False)


async def test_a_rank_that_had_to_take_a_newer_life_answers_in_its_name(weaver: PlayedWeaver, lively: Settings) -> None:
    replies = await weaver.client.subscribe(REPLY.pattern())
    with attach("job", "hi", rank=0, settings=lively):
        old = (await weaver.report(Hello)).incarnation
        await weaver.say(Muted(term=1, incarnation=old, newest=new_incarnation(newer_than=old), pid=7, node="n2"))
        new = (await weaver.report(Hello, 1)).incarnation
        await weaver.say(Welcome(term=1, incarnation=new, beat_seconds=1.0), RANK)
        await weaver.say(QueryStep(term=1, incarnation=new, id="r1"))
        answer = decode_reply((await replies.next_msg(60)).data)
        assert isinstance(answer, StepReport)
        assert answer.incarnation == new


def test_an_order_is_carried_out_once() -> None:
    boundary = StepBoundary(LIFE, Meter(), SETTINGS)
    boundary.set_paused(True)
    order = Order(term=1, incarnation=LIFE, id="o1", verb="resume")
    first = boundary.carry_out(order)
    assert not boundary.participant.paused
    boundary.set_paused(True)
    assert boundary.carry_out(order) == first
    assert boundary.participant.paused


def test_stacks_show_where_every_thread_is() -> None:
    order = Order(term=1, incarnation=LIFE, id="o1", verb="stacks")
    shown = StepBoundary(LIFE, Meter(), SETTINGS).carry_out(order)
    assert shown.text.startswith("thread MainThread:")
    assert "test_stacks_show_where_every_thread_is" in shown.text

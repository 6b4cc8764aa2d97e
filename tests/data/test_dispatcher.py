"""The dispatcher without processes: order, window, resizes, deaths."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from torchloom.data.dispatcher import IDLE_DEATHS, Dispatcher
from torchloom.data.loading_plan import (
    Batch,
    Command,
    End,
    KilledLoaders,
    LoadersKeepDying,
    LoadHere,
    SamplerFailed,
    Send,
    Start,
    Stop,
    Wait,
    Yield,
)
from torchloom.data.shards import ShardStream


def batches(count: int) -> Iterator[Batch]:
    return (Batch(number, number * 4, [number * 4 + place for place in range(4)]) for number in range(count))


def sends(commands: list[Command]) -> list[tuple[int, int]]:
    return [(command.loader, command.batch.number) for command in commands if isinstance(command, Send)]


def starts(commands: list[Command]) -> list[int]:
    return [command.loader for command in commands if isinstance(command, Start)]


def stops(commands: list[Command]) -> list[int]:
    return [command.loader for command in commands if isinstance(command, Stop)]


def number(outcome: object) -> int:
    assert isinstance(outcome, Yield | LoadHere), outcome
    return outcome.batch.number


def test_the_window_is_spread_over_the_loaders() -> None:
    plan = Dispatcher(batches(10), target=2, prefetch=2).plan()
    assert starts(plan) == [0, 1]
    assert sends(plan) == [(0, 0), (1, 1), (0, 2), (1, 3)]


def test_batches_are_yielded_in_order_whatever_the_order_of_arrival() -> None:
    dispatcher = Dispatcher(batches(4), target=2, prefetch=2)
    dispatcher.plan()
    dispatcher.arrived(1, 1, "b")
    assert isinstance(dispatcher.take(), Wait)
    dispatcher.arrived(0, 0, "a")
    outcomes = [dispatcher.take(), dispatcher.take()]
    assert [(number(outcome), outcome.result) for outcome in outcomes if isinstance(outcome, Yield)] == [
        (0, "a"),
        (1, "b"),
    ]


def test_without_order_batches_are_yielded_as_they_arrive() -> None:
    dispatcher = Dispatcher(batches(4), target=2, prefetch=2, in_order=False)
    dispatcher.plan()
    dispatcher.arrived(1, 3, "d")
    dispatcher.arrived(0, 0, "a")
    assert [number(dispatcher.take()), number(dispatcher.take())] == [3, 0]


def test_no_more_is_drawn_than_the_window_allows() -> None:
    dispatcher = Dispatcher(batches(10), target=2, prefetch=2)
    dispatcher.plan()
    dispatcher.arrived(1, 1, None)
    dispatcher.arrived(1, 3, None)
    assert dispatcher.plan() == [], "0 is missing, and four are not yielded"
    dispatcher.arrived(0, 0, None)
    assert number(dispatcher.take()) == 0
    assert sends(dispatcher.plan()) == [(1, 4)], "to the one that has nothing to do"


def test_batches_of_a_dead_loader_are_sent_again_before_new_ones() -> None:
    dispatcher = Dispatcher(batches(10), target=2, prefetch=2)
    dispatcher.plan()
    dispatcher.died(0)
    plan = dispatcher.plan()
    assert starts(plan) == [0]
    assert sends(plan) == [(0, 0), (0, 2)]


def test_only_the_batch_that_was_being_loaded_is_suspect() -> None:
    dispatcher = Dispatcher(batches(10), target=1, prefetch=3, kill_limit=2)
    dispatcher.plan()
    for _ in range(2):
        dispatcher.died(0)
        dispatcher.plan()
    outcome = dispatcher.take()
    assert isinstance(outcome, KilledLoaders)
    assert (outcome.batch.number, outcome.batch.kills, outcome.batch.indices) == (0, 2, [0, 1, 2, 3])
    for arrival in (1, 2):
        dispatcher.arrived(0, arrival, None)
        assert number(dispatcher.take()) == arrival


def test_a_batch_that_kills_is_reported_when_its_turn_comes() -> None:
    dispatcher = Dispatcher(batches(2), target=2, prefetch=1, kill_limit=1)
    dispatcher.plan()
    dispatcher.died(1)
    dispatcher.plan()
    assert isinstance(dispatcher.take(), Wait)
    dispatcher.arrived(0, 0, None)
    assert number(dispatcher.take()) == 0
    assert isinstance(dispatcher.take(), KilledLoaders)


def test_a_smaller_number_lets_loaders_finish() -> None:
    dispatcher = Dispatcher(batches(10), target=2, prefetch=1)
    dispatcher.plan()
    dispatcher.resize(1)
    assert dispatcher.plan() == []
    dispatcher.arrived(1, 1, None)
    assert dispatcher.plan() == [Stop(1)]


def test_a_loader_that_finishes_is_kept_if_the_number_grows_again() -> None:
    dispatcher = Dispatcher(batches(10), target=2, prefetch=1)
    dispatcher.plan()
    dispatcher.resize(1)
    dispatcher.plan()
    dispatcher.resize(3)
    plan = dispatcher.plan()
    assert starts(plan) == [2]
    assert dispatcher.active == [0, 1, 2]


def test_the_number_of_a_stopped_loader_is_used_again() -> None:
    dispatcher = Dispatcher(batches(10), target=3, prefetch=1)
    dispatcher.plan()
    dispatcher.died(1)
    assert starts(dispatcher.plan()) == [1]


def test_without_loaders_batches_are_loaded_in_training_after_those_that_were_sent() -> None:
    dispatcher = Dispatcher(batches(3), target=1, prefetch=1)
    dispatcher.plan()
    dispatcher.resize(0)
    dispatcher.plan()
    assert isinstance(dispatcher.take(), Wait)
    dispatcher.arrived(0, 0, None)
    assert stops(dispatcher.plan()) == [0]
    outcomes = [dispatcher.take() for _ in range(4)]
    assert [type(outcome) for outcome in outcomes] == [Yield, LoadHere, LoadHere, End]


def test_a_batch_that_killed_a_loader_is_never_loaded_in_training() -> None:
    dispatcher = Dispatcher(batches(3), target=1, prefetch=1)
    dispatcher.plan()
    dispatcher.resize(0)
    dispatcher.died(0)
    plan = dispatcher.plan()
    assert (starts(plan), sends(plan)) == ([0], [(0, 0)])
    dispatcher.cannot_start()
    dispatcher.died(0)
    dispatcher.plan()
    assert isinstance(dispatcher.take(), KilledLoaders)


def test_if_no_loader_can_start_the_others_continue_and_then_training_loads() -> None:
    dispatcher = Dispatcher(batches(4), target=2, prefetch=1)
    dispatcher.plan()
    dispatcher.start_failed(1)
    dispatcher.cannot_start()
    dispatcher.plan()
    assert isinstance(dispatcher.take(), Wait)
    dispatcher.arrived(0, 0, None)
    assert sends(dispatcher.plan()) == [(0, 1)], "lost without suspicion"
    dispatcher.arrived(0, 1, None)
    assert [number(dispatcher.take()), number(dispatcher.take())] == [0, 1]
    dispatcher.died(0)
    dispatcher.plan()
    assert number(dispatcher.take()) == 2


def test_loaders_end_when_nothing_is_left_to_load() -> None:
    dispatcher = Dispatcher(batches(2), target=2, prefetch=2)
    dispatcher.plan()
    dispatcher.arrived(1, 1, None)
    assert stops(dispatcher.plan()) == [1]
    assert starts(dispatcher.plan()) == []


def test_persistent_loaders_stay() -> None:
    dispatcher = Dispatcher(batches(2), target=2, prefetch=2, keep_idle=True)
    dispatcher.adopt(0)
    dispatcher.adopt(1)
    plan = dispatcher.plan()
    assert (starts(plan), sends(plan)) == ([], [(0, 0), (1, 1)])
    dispatcher.arrived(0, 0, None)
    dispatcher.arrived(1, 1, None)
    assert dispatcher.plan() == []


def test_loaders_that_die_before_they_do_anything_are_reported() -> None:
    dispatcher = Dispatcher(batches(3), target=1, prefetch=1)
    dispatcher.plan()
    dispatcher.resize(2)
    for _ in range(IDLE_DEATHS):
        assert starts(dispatcher.plan()) == [1]
        dispatcher._loaders[1].outstanding.clear()
        dispatcher.died(1)
    assert isinstance(dispatcher.take(), LoadersKeepDying)


def test_an_error_of_the_sampler_comes_after_the_batches_before_it() -> None:
    def broken() -> Iterator[Batch]:
        yield from batches(1)
        raise ValueError("sampler")

    dispatcher = Dispatcher(broken(), target=2, prefetch=2)
    dispatcher.plan()
    assert isinstance(dispatcher.take(), Wait)
    dispatcher.arrived(0, 0, None)
    assert number(dispatcher.take()) == 0
    outcome = dispatcher.take()
    assert isinstance(outcome, SamplerFailed)
    assert outcome.error.args == ("sampler",)
    assert isinstance(dispatcher.take(), End)


@given(st.data())
def test_each_batch_is_yielded_once_and_in_order_through_resizes_and_deaths(data: st.DataObject) -> None:
    total = data.draw(st.integers(0, 25))
    prefetch = data.draw(st.integers(1, 3))
    in_order = data.draw(st.booleans())
    dispatcher = Dispatcher(
        batches(total), data.draw(st.integers(0, 4)), prefetch, in_order=in_order, kill_limit=1_000_000
    )
    sent: dict[int, list[int]] = {}
    yielded: list[int] = []
    for _ in range(1000):
        for command in dispatcher.plan():
            match command:
                case Start(loader=loader):
                    assert loader not in sent
                    sent[loader] = []
                case Stop(loader=loader):
                    assert sent.pop(loader) == []
                case Send(loader=loader, batch=batch):
                    sent[loader].append(batch.number)
                    assert len(sent[loader]) <= prefetch
        outcome = dispatcher.take()
        if isinstance(outcome, End):
            break
        if isinstance(outcome, Yield | LoadHere):
            yielded.append(outcome.batch.number)
            continue
        assert isinstance(outcome, Wait)
        busy = [loader for loader in sent if sent[loader]]
        event = data.draw(st.sampled_from(["arrive", "arrive", "arrive", "die", "resize"]))
        if event == "resize" or not busy:
            dispatcher.resize(data.draw(st.integers(0, 4)))
        elif event == "die":
            loader = data.draw(st.sampled_from(sorted(sent)))
            del sent[loader]
            dispatcher.died(loader)
        else:
            loader = data.draw(st.sampled_from(busy))
            dispatcher.arrived(loader, sent[loader].pop(0), None)
    assert (yielded if in_order else sorted(yielded)) == list(range(total))
    assert isinstance(dispatcher.take(), End)


def test_loaders_are_needed_until_the_last_batch_has_arrived() -> None:
    dispatcher = Dispatcher(batches(2), target=2, prefetch=2)
    dispatcher.plan()
    dispatcher.arrived(1, 1, None)
    dispatcher.plan()
    assert not dispatcher.needs_no_loaders, "0 may have to be loaded again"
    dispatcher.died(0)
    assert not dispatcher.needs_no_loaders
    assert starts(dispatcher.plan()) == [0]
    dispatcher.arrived(0, 0, None)
    dispatcher.plan()
    assert dispatcher.needs_no_loaders
    assert [number(dispatcher.take()), number(dispatcher.take())] == [0, 1]


def grouped(count: int, groups: int) -> Iterator[Batch]:
    return (Batch(number, 0, number, group=number % groups) for number in range(count))


def test_the_batches_of_a_group_go_to_one_loader() -> None:
    dispatcher = Dispatcher(grouped(8, 2), 2, 2)
    assert sends(dispatcher.plan()) == [(0, 0), (1, 1), (0, 2), (1, 3)]
    dispatcher.arrived(1, 1, "late ones come first")
    assert sends(dispatcher.plan()) == [], "the window is full until a batch is yielded"
    dispatcher.arrived(0, 0, "")
    assert isinstance(dispatcher.take(), Yield)
    assert isinstance(dispatcher.take(), Yield)
    assert sends(dispatcher.plan()) == [(0, 4), (1, 5)]


def test_groups_move_to_a_loader_that_has_fewer_and_are_announced_there() -> None:
    dispatcher = Dispatcher(grouped(100, 4), 1, 4)
    first = [command for command in dispatcher.plan() if isinstance(command, Send)]
    assert [(send.loader, send.is_new_host) for send in first] == [(0, True)] * 4
    dispatcher.resize(2)
    second = [command for command in dispatcher.plan() if isinstance(command, Send)]
    assert [(send.loader, send.batch.group, send.is_new_host) for send in second] == [
        (1, 0, True),
        (1, 1, True),
        (0, 2, False),
        (0, 3, False),
    ]


def test_groups_stay_where_they_are_when_others_have_ended() -> None:
    ended: set[int | None] = set()
    stream = (batch for batch in grouped(100, 4) if batch.group not in ended)
    dispatcher = Dispatcher(stream, 2, 2, end_group=lambda batch, exists: ended.add(batch.group))
    hosts = {send.batch.group: send.loader for send in dispatcher.plan() if isinstance(send, Send)}
    assert hosts == {0: 0, 1: 1, 2: 0, 3: 1}
    for number in (0, 2):
        dispatcher.group_ended(0, number)
    for number in (1, 3):
        dispatcher.arrived(1, number, "")
        dispatcher.take()
    sent = [command for command in dispatcher.plan() if isinstance(command, Send)]
    assert {(send.loader, send.batch.group) for send in sent} == {(1, 1), (1, 3)}
    dispatcher.resize(3)
    moved = [command for command in dispatcher.plan() if isinstance(command, Send)]
    assert any(send.is_new_host for send in moved), "a loader that starts hosts its share"


def test_without_an_order_a_group_keeps_its_own() -> None:
    dispatcher = Dispatcher(grouped(100, 2), 1, 2, in_order=False)
    dispatcher.plan()
    dispatcher.resize(2)
    assert (1, 2) in sends(dispatcher.plan()), "group 0 has moved"
    dispatcher.arrived(1, 2, "")
    assert isinstance(dispatcher.take(), Wait)
    dispatcher.arrived(0, 0, "")
    outcomes = [dispatcher.take(), dispatcher.take()]
    assert [outcome.batch.number for outcome in outcomes if isinstance(outcome, Yield)] == [0, 2]


def test_a_group_that_has_ended_has_no_more_batches() -> None:
    ended: list[tuple[int, bool]] = []
    stream = grouped(6, 2)
    dispatcher = Dispatcher(stream, 2, 1, end_group=lambda batch, exists: ended.append((batch.number, exists)))
    dispatcher.plan()
    dispatcher.group_ended(0, 0)
    assert ended == [(0, False)]
    dispatcher.arrived(1, 1, "")
    outcome = dispatcher.take()
    assert isinstance(outcome, Yield)
    assert outcome.batch.number == 1


def test_a_loader_that_could_not_be_started_and_is_not_needed() -> None:
    dispatcher = Dispatcher(batches(1), target=2, prefetch=1)
    commands = dispatcher.plan()
    assert starts(commands) == [0, 1]
    assert any(isinstance(command, Stop) and command.loader == 1 for command in commands)
    dispatcher.start_failed(1)
    dispatcher.arrived(0, 0, None)
    assert number(dispatcher.take()) == 0


@given(
    data=st.data(),
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    target=st.integers(0, 3),
    prefetch=st.integers(1, 3),
)
def test_each_batch_of_each_group_is_yielded_once_and_in_order(
    data: st.DataObject, sizes: list[int], target: int, prefetch: int
) -> None:
    """Groups of known sizes, whose ends are found out by loading; resizes and deaths at any moment."""
    stream = ShardStream([0] * len(sizes), [None] * len(sizes))
    dispatcher = Dispatcher(stream, target, prefetch, kill_limit=10_000, end_group=stream.end)
    sent: dict[int, list[Batch]] = {}
    yielded: list[tuple[int, int]] = []
    for _ in range(10_000):
        for command in dispatcher.plan():
            match command:
                case Start(loader=loader):
                    sent[loader] = []
                case Stop(loader=loader):
                    assert sent.pop(loader) == []
                case Send(loader=loader, batch=batch):
                    sent[loader].append(batch)
        outcome = dispatcher.take()
        if isinstance(outcome, End):
            break
        if isinstance(outcome, LoadHere) and outcome.batch.indices.ordinal >= sizes[outcome.batch.indices.shard]:
            dispatcher.end_group(outcome.batch, exists=False)
            continue
        if isinstance(outcome, Yield | LoadHere):
            yielded.append((outcome.batch.indices.ordinal, outcome.batch.indices.shard))
            continue
        assert isinstance(outcome, Wait)
        busy = [loader for loader in sent if sent[loader]]
        event = data.draw(st.sampled_from(["arrive", "arrive", "arrive", "die", "resize"]))
        if event == "resize" or not busy:
            dispatcher.resize(data.draw(st.integers(0, 4)))
        elif event == "die":
            loader = data.draw(st.sampled_from(sorted(sent)))
            del sent[loader]
            dispatcher.died(loader)
        else:
            loader = data.draw(st.sampled_from(busy))
            batch = sent[loader].pop(0)
            if batch.indices.ordinal < sizes[batch.indices.shard]:
                dispatcher.arrived(loader, batch.number, None)
            else:
                dispatcher.group_ended(loader, batch.number)
    assert yielded == sorted((ordinal, shard) for shard, size in enumerate(sizes) for ordinal in range(size))

"""The odd one out among the stacks of all ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchloom.core.detect.hang import spans
from torchloom.core.detect.stack_groups import describe_groups, group_stacks
from torchloom.protocol.codec import encode
from torchloom.protocol.phrase import phrase
from torchloom.views.wording.phrases import render_all

WAITING = """\
Thread 0x00007f11 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/usr/lib/python3.11/threading.py", line 1045 in _bootstrap_inner
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f22 (most recent call first):
  File "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2810 in all_reduce
  File "/env/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/train.py", line 40 in main
  File "/home/me/train.py", line 90 in <module>
"""
COMPUTING = """\
Thread 0x00007f22 (most recent call first):
  File "/home/me/model.py", line 88 in forward
  File "/env/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1751 in _call_impl
  File "/home/me/train.py", line 38 in main
  File "/home/me/train.py", line 90 in <module>
"""
PY_SPY = """\
Process 4711: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 4711 (active): "MainThread"
    linear (torch/nn/functional.py:125)
    forward (model.py:88)
    main (train.py:38)
    <module> (train.py:90)
Thread 4720 (idle): "torchloom"
    select (selectors.py:468)
    _bootstrap (threading.py:1002)
"""


def test_ranks_at_the_same_place_stand_together_and_the_other_one_is_named() -> None:
    groups = group_stacks({**dict.fromkeys(range(7), WAITING), 7: COMPUTING})
    assert [(found.ranks, found.waits) for found in groups] == [((0, 1, 2, 3, 4, 5, 6), True), ((7,), False)]
    waits = phrase(
        "ranks_wait_in",
        ranks=spans(range(7)),
        frame="all_reduce (distributed_c10d.py:2810)",
        caller="main (train.py:40)",
    )
    odd = phrase("ranks_are_in", ranks=spans([7]), frame="forward (model.py:88)", caller="")
    assert describe_groups(groups) == (waits, phrase("odd_one_out", line=odd))


def test_what_measures_the_waiting_is_not_named() -> None:
    ours = '  File "/env/site-packages/torchloom/threadlet/metrics/wait_times.py", line 129 in timed\n'
    first = '  File "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"'
    measured = WAITING.replace(first, ours + first)
    assert measured != WAITING
    assert group_stacks({0: measured, 1: WAITING}) == group_stacks({0: WAITING, 1: WAITING})


def test_what_py_spy_writes_is_read_too() -> None:
    (found,) = group_stacks({3: PY_SPY})
    assert [str(frame) for frame in found.frames[:2]] == ["linear (functional.py:125)", "forward (model.py:88)"]
    where = phrase("ranks_are_in", ranks=spans([3]), frame="linear (functional.py:125)", caller="forward (model.py:88)")
    assert describe_groups([found]) == (where,)


def test_the_thread_that_is_called_main_is_read_wherever_it_stands() -> None:
    turned = PY_SPY[PY_SPY.index("Thread 4720") :] + PY_SPY[PY_SPY.index("Thread 4711") : PY_SPY.index("Thread 4720")]
    assert group_stacks({0: PY_SPY, 1: turned})[0].ranks == (0, 1)
    autograd = PY_SPY + 'Thread 4733 (idle): "pt_autograd_0"\n    backward (function.py:307)\n'
    assert group_stacks({0: PY_SPY, 1: autograd})[0].ranks == (0, 1)


def test_without_names_it_is_the_one_that_was_not_started_by_another() -> None:
    main, other = COMPUTING, WAITING[: WAITING.index("Current thread")]
    assert group_stacks({0: main + other, 1: other + main})[0].ranks == (0, 1)


def test_the_culprits_that_are_known_are_the_odd_ones() -> None:
    groups = group_stacks({0: WAITING, 1: WAITING, 2: COMPUTING, 3: ""})
    odd = [line for line in describe_groups(groups, culprits=(3,)) if line.code == "odd_one_out"]
    assert odd == [phrase("odd_one_out", line=phrase("stack_unread", ranks=spans([3])))]


def test_without_anyone_waiting_the_few_are_odd_among_the_many() -> None:
    other = COMPUTING.replace("line 88", "line 77")
    assert describe_groups(group_stacks({0: COMPUTING, 1: COMPUTING, 2: COMPUTING, 3: other}))[-1].code == "odd_one_out"
    assert not any(line.code == "odd_one_out" for line in describe_groups(group_stacks({0: COMPUTING, 1: other})))


def test_what_is_told_is_bounded_however_much_there_is() -> None:
    many = {
        rank: f'Thread 0x1 (most recent call first):\n  File "{"x" * 900}{rank}.py", line {rank} in {"f" * 50}\n'
        for rank in range(0, 4000, 2)
    }
    lines = describe_groups(group_stacks(many), culprits=range(0, 4000, 3))
    assert len("\n".join(render_all(lines)).encode()) <= 6000
    assert len(encode(lines)) <= 8000
    assert lines[-1].code == "more_ranks_elsewhere"


pieces = st.sampled_from(
    ["Thread 0x1 (most recent call first):", 'File "a.py", line 3 in f', "    f (x.py:3)", "    f (x.py)", "Thread"]
)


@given(
    st.dictionaries(st.integers(0, 10**6), st.text() | st.lists(pieces | st.text()).map("\n".join)),
    st.sets(st.integers()),
)
def test_garbage_does_no_harm(stacks: dict[int, str], culprits: set[int]) -> None:
    groups = group_stacks(stacks)
    assert sorted(rank for found in groups for rank in found.ranks) == sorted(stacks)
    assert len("\n".join(render_all(describe_groups(groups, culprits))).encode()) <= 6000

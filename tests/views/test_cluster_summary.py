"""What an agent reports about its node, as people and programs outside receive it."""

from __future__ import annotations

from torchloom.protocol.node import AttemptStatus, Fitness, NodeBeat, RankStatus
from torchloom.protocol.phrase import phrase
from torchloom.views.cluster_summary import readable

LIFE = "0" * 24


def test_the_beat_of_an_agent_is_shown_in_sentences() -> None:
    ended = RankStatus(
        rank=0,
        incarnation=LIFE,
        state="ended",
        evidence=phrase("killed_with_supervisor"),
        error=phrase("out_of_memory", kills=1),
        why_cold=phrase("nothing_preloaded"),
    )
    unfit = phrase("check_not_passed", what="memory", found=phrase("memory_free", free=10, total=2000))
    beat = NodeBeat(
        incarnation=LIFE,
        host="127.0.0.1",
        cores=1,
        memory_mb=1,
        attempts=(AttemptStatus(job="a", attempt=1, ranks=(ended, RankStatus(rank=1, incarnation=LIFE))),),
        fitness=Fitness(number=1, unfit=(unfit,)),
    )
    shown = readable(beat)
    first, second = shown.attempts[0].ranks
    assert (first.evidence, first.why_cold) == ("killed with its supervisor", "nothing is preloaded")
    assert first.error == "out of memory: the kernel killed a process of its cgroup while it ran"
    assert second == beat.attempts[0].ranks[1]
    assert shown.fitness is not None
    assert shown.fitness.unfit == ("memory: 10 of 2,000 MB free",)

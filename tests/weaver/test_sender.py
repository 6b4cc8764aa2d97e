"""What the weaver sends arrives, also where it is large."""

from __future__ import annotations

from torchloom.bus.connection import connect, find
from torchloom.core.decision import Decision
from torchloom.core.state.cluster import ClusterState
from torchloom.protocol.codec import decode_node_command
from torchloom.protocol.job_spec import Task
from torchloom.protocol.node import Launch, Place
from torchloom.protocol.subjects import TASK, Role
from torchloom.settings import Settings
from torchloom.weaver.event_queue import EventQueue
from torchloom.weaver.health import Clock, Health
from torchloom.weaver.main import rank_minter
from torchloom.weaver.sender import Sender

MOST = 1024
"""Ranks of a job on one node."""


async def test_an_agent_gets_the_credentials_of_as_many_ranks_as_a_node_may_have(settings: Settings) -> None:
    client = await connect(find(settings, Role.WEAVER), name="weaver")
    agent = await connect(find(settings, Role.AGENT), name="agent")
    arrived = await agent.subscribe(TASK.to(node="n"))
    await agent.flush()
    health, job = Health(Clock()), "j" * 128
    sender = Sender(client, EventQueue(health), health, ClusterState(settings), rank_minter(settings))
    places = tuple(Place(rank=n, local=n, node="n", incarnation="0" * 24) for n in range(MOST))
    task = Task(argv=("a.py",), per_node=MOST, part_of=job, replica="r" * 128)
    launch = Launch(term=1, job=job, attempt=1, task=task, places=places, host="h", port=1)
    await sender.send(Decision(tasks=(("n", launch),)), reply="")
    command = decode_node_command((await arrived.next_msg(timeout=30)).data)
    assert isinstance(command, Launch)
    assert len(command.creds) == MOST
    for one in (client, agent):
        await one.close()

"""Views made by hand, for tests."""

from __future__ import annotations

from typing import Any

from torchloom.protocol.ids import RankId, ReplicaId
from torchloom.protocol.rank import Beat, KnobSpec
from torchloom.protocol.records import About
from torchloom.protocol.views import (
    Assignment,
    ChangeView,
    ClusterView,
    DeviceView,
    IncidentView,
    JobView,
    KnobsView,
    KnobView,
    PlaneView,
    RankView,
)

NOW = 1_800_000_000.0
LIFE = "0" * 24
GPU = "GPU-307a982d-bf2b-4cc3-64e3-aae456bf6a28"
REPLICA = "train_ddp_0:d5aa538f-3268-4f78-ae88-3afff894e629"


def plane(**more: Any) -> PlaneView:
    known: dict[str, Any] = {
        "weaver": "host:42", "term": 3, "began": NOW - 7200, "now": NOW, "log_seq": 1234, "version": "0.1.0",
        "server": "torchloom 2.15.1",
    }  # fmt: skip
    return PlaneView(**known | more)


def rank(job: str = "mnist", replica: str = "hi", number: int = 0, **more: Any) -> RankView:
    known: dict[str, Any] = {
        "rank": RankId(job, replica, number), "presence": "live", "since": NOW - 60, "reason": "", "incarnation": LIFE,
        "node": "n1", "pid": 7, "devices": (GPU,), "world_size": 2, "heard": NOW - 0.4,
        "beat": Beat(incarnation=LIFE, step=1500, loss=0.1234, samples_per_second=512.0),
    }  # fmt: skip
    return RankView(**known | more)


def job(name: str = "mnist", **more: Any) -> JobView:
    known: dict[str, Any] = {
        "job": name, "phase": "running", "began": NOW - 3600, "ranks": 2, "live": 1, "step": 1500, "loss": 0.1234,
        "samples_per_second": 1024.0,
    }  # fmt: skip
    return JobView(**known | more)


def assignment(device: str, job: str, replica: str, number: int | None = 0, node: str = "n1") -> Assignment:
    return Assignment(device=device, replica=ReplicaId(job, replica), rank=number, node=node)


def device(name: str = GPU, **more: Any) -> DeviceView:
    known: dict[str, Any] = {"device": name, "node": "n1", "health": "ok", "since": NOW - 60}
    return DeviceView(**known | more)


def incident(id: str = "i7", **more: Any) -> IncidentView:
    known: dict[str, Any] = {
        "id": id, "opened": NOW - 90, "what": "its link closed",
        "about": About(rank=RankId("mnist", "hi", 1)), "job": "mnist",
        "decision": "reported", "reason": "no policy",
    }  # fmt: skip
    return IncidentView(**known | more)


def knob(name: str = "lr", **more: Any) -> KnobView:
    """A knob as it is seen; `spec` has what is to be different in its description."""
    known: dict[str, Any] = {"kind": "float", "value": 0.1, "low": 0.0, "high": 1.0, "help": "step size"}
    spec = KnobSpec(**{"name": name} | known | more.pop("spec", {}))
    return KnobView(**{"spec": spec, "value": spec.value} | more)


def change(id: str = "c3", **more: Any) -> ChangeView:
    known: dict[str, Any] = {
        "id": id, "number": 3, "job": "mnist", "action": "set", "values": {"lr": 0.01}, "before": {"lr": 0.1},
        "step": 1520, "over": 0, "phase": "settled", "outcome": "applied at step 1520 on 2 ranks",
        "operator": "ann@box", "asked": NOW - 30, "target": "mnist", "ranks": 2,
    }  # fmt: skip
    return ChangeView(**known | more)


def knobs() -> KnobsView:
    """One of each kind, and a change."""
    return KnobsView(
        knobs=(
            knob("lr", value=0.01, changed_by="ann@box", changed=NOW - 30, change="c3"),
            knob("accumulate", spec={"kind": "int", "value": 4, "low": 1, "high": 64}),
            knob("betas", spec={"kind": "floats", "value": (0.9, 0.999), "help": ""}),
            knob("shuffle", spec={"kind": "bool", "value": True, "low": None, "high": None, "per": "rank"}),
            knob("log_level", spec={"kind": "enum", "value": "INFO", "choices": ("DEBUG", "INFO"), "help": "root"}),
        ),
        changes=(change(),),
    )


def cluster(**more: Any) -> ClusterView:
    ranks = (rank(number=0), rank(number=1, presence="lost", beat=None))
    known: dict[str, Any] = {
        "plane": plane(), "jobs": (job(),), "ranks": ranks, "devices": (device(),),
        "assignments": (assignment(GPU, "mnist", "hi"),), "incidents": (incident(),),
    }  # fmt: skip
    known |= more
    return ClusterView(**{"total_ranks": len(known["ranks"])} | known)

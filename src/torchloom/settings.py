"""Every setting that users can change: its default, its unit, and the environment variable that sets it.

The environment is read once, at the entry (`Settings.from_env`). A field `grace_seconds` is set by
`TORCHLOOM_GRACE_SECONDS`. docs/settings.md is printed from this file.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import logging
import math
import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from torchloom.errors import BadSetting

ADDRESS_VARIABLES = ("TORCHLOOM_ADDR", "torchLoom_ADDR", "MARDUK_ADDR")
"""The address of an existing NATS server; the older spellings are those of the projects torchLoom grew from."""
DEFAULT_ADDRESS = "nats://localhost:4222"


@dataclass(frozen=True)
class Settings:
    """Everything that can be set from outside. Pass this object on, not ten flags."""

    addr: str = ""
    """NATS server or comma-separated cluster to use instead of the embedded one; empty: the state folder's server,
    else nats://localhost:4222."""
    state: str = ""
    """The state folder; empty: `$XDG_STATE_HOME/torchloom`, else `~/.local/state/torchloom`."""
    creds: str = ""
    """A NATS credentials file to use instead of the state folder's."""
    system_creds: str = ""
    """Credentials of a user of the system account of an existing server: with them the weaver learns of deaths from
    the server, without it only notices silence."""
    tls_ca: str = ""
    """PEM file with the authority to trust for TLS; empty: the state folder's, else the system's."""
    off: bool = False
    """`1` makes `attach()` return an object that does nothing at all."""

    beat_seconds: float = 1.0
    """How often a rank reports, until the weaver tells it otherwise."""
    ranks_per_beat_second: float = 10_000.0
    """Beats per second the weaver asks for at most: with more ranks than this each beats more slowly."""
    silence_seconds: float = 6.0
    """A rank not heard for this long, and for five of its beats, is lost even if no link closed."""
    grace_seconds: float = 3.0
    """A rank whose link closed has this long to come back before it is called dead."""
    frozen_grace_seconds: float = 30.0
    """The same where the process may well be alive: it fell silent, or its link went stale (SIGSTOP, a held GIL)."""
    node_patience_seconds: float = 30.0
    """An agent that fell silent, and its ranks with it, has this long to come back before the node is given up."""
    settle_seconds: float = 1.0
    """A beat this long after a loss proves life; an earlier one may have been on its way when the rank died."""
    reunion_seconds: float = 3.0
    """After the weaver starts or reconnects: time for ranks to reconnect before the roll-call."""
    nap_seconds: float = 1.5
    """A gap this long in the weaver's own clock means that it slept: every timer restarts."""
    linger_seconds: float = 2.0
    """A job whose ranks are all gone for this long has ended."""
    keep_gone_ranks: int = 64
    """Ranks that are gone, per running job, before the oldest is forgotten."""
    keep_ended_jobs: int = 200
    """Ended jobs before the oldest is forgotten."""
    keep_closed_incidents: int = 500
    """Closed incidents before the oldest is forgotten."""

    ingress: bool = True
    """`0`: the weaver opens no HTTP endpoint for the alerts of a monitoring system."""
    ingress_host: str = "127.0.0.1"
    """Where that endpoint listens; beyond this machine only with a certificate."""
    ingress_port: int = 0
    """Its port; 0: the one of last time, at first any free one."""
    ingress_cert: str = ""
    """PEM file with its certificate."""
    ingress_key: str = ""
    """PEM file with the key of that certificate."""
    ingress_token: str = ""
    """File with the token that alerts must carry; empty: `ingress.token` in the state folder, made there."""

    snapshot_entries: int = 1000
    """Log entries between two snapshots of the cluster state."""
    snapshot_seconds: float = 60.0
    """A changed cluster state is written as a snapshot at least this often."""
    curve_seconds: float = 10.0
    """How often a point is added to each rank's history."""
    curve_points: int = 240
    """Points kept of one rank's history; when full, neighbours are merged and the spacing doubles."""

    lead_seconds: float = 0.015
    """How far ahead of the foremost rank a change takes effect: at least one step more than this long."""
    verdict_seconds: float = 1.0
    """A rank that reaches the step of a change without a verdict waits at most this long for one."""
    welcome_seconds: float = 1.0
    """`attach()` waits at most this long for the values in force, and only if a control plane answers."""
    pause_orphan_seconds: float = 600.0
    """A paused rank that has had no link for this long continues."""

    goodbye_seconds: float = 0.5
    """A process that exits waits at most this long for its goodbye to be stored, and only if the link is up."""
    reconnect_seconds: float = 0.5
    """Longest pause between two attempts of a rank or service to reach NATS again."""

    # What counts as trouble in a running job: docs/detection.md.
    hang_floor_seconds: float = 2.0
    """A rank is never said to hang before it has made no step for this long."""
    hang_factor: float = 5.0
    """Nor before this many times its own slow steps (the recent 99th percentile)."""
    first_step_seconds: float = 1800.0
    """The first steps of a rank may take this long each: loading, compiling, waiting for its peers."""
    phase_seconds: float = 1800.0
    """A rank that says that it evaluates or saves (`phase()`) may stay at one step this long."""
    hang_act_seconds: float = 600.0
    """A rank has made no step for this long, and for three of its longest pauses, before anything is done about it."""
    frozen_seconds: float = 1.0
    """A process stopped for this long (SIGSTOP) is frozen; one that a debugger holds is not."""
    frozen_act_seconds: float = 2.0
    """It may stay frozen this long before anything is done about it."""
    held_seconds: float = 1.0
    """A rank in which one thread has kept all others from the interpreter for this long is held."""
    held_act_seconds: float = 2.0
    """It may be held this long, using no processor, before anything is done about it."""
    busy_act_seconds: float = 60.0
    """The same while it computes: a long garbage collection or pickling ends by itself."""
    spike_factor: float = 8.0
    """A loss or gradient norm further above its median than this many times its usual spread is a spike."""
    memory_horizon_seconds: float = 600.0
    """A rank whose memory grows so that the machine would be full within this time is reported."""
    starved_share: float = 0.5
    """A rank that waits for data during more than this share of its steps is starved."""
    slowdown_factor: float = 1.5
    """A rank whose steps take this many times what they used to has slowed down."""
    straggler_factor: float = 1.5
    """A rank whose own work takes this many times that of its peers is a straggler."""
    straggler_beats: int = 5
    """Of twice as many beats three quarters must be slow before it is called one."""
    device_temperature_celsius: float = 90.0
    """A GPU this hot is warned about, until it is five degrees below."""
    overdue_factor: float = 3.0
    """A checkpoint is overdue after this many times the usual interval, and a minute."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        env = os.environ if environ is None else environ
        values: dict[str, object] = {}
        for field in fields(cls):
            names = ADDRESS_VARIABLES if field.name == "addr" else (f"TORCHLOOM_{field.name.upper()}",)
            name = next((name for name in names if env.get(name)), None)
            if name is not None:
                values[field.name] = _parse(name, env[name], type(field.default))
        return cls(**values)  # type: ignore[arg-type]

    def with_state(self, state: str | Path | None) -> Settings:
        """The same settings with the state folder given on a command line, if any."""
        return self if state is None else replace(self, state=str(state))

    @property
    def state_folder(self) -> Path:
        if self.state:
            return Path(self.state).expanduser().absolute()
        base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        return Path(base).expanduser().absolute() / "torchloom"


def _parse(name: str, text: str, kind: type) -> object:
    if kind is bool:
        if text.lower() in {"1", "true", "yes", "on"}:
            return True
        if text.lower() in {"0", "false", "no", "off"}:
            return False
        raise BadSetting(name, text, "expected 1 or 0")
    if kind is str:
        return text
    try:
        number = kind(text)
    except ValueError:
        raise BadSetting(name, text, f"expected {'a whole number' if kind is int else 'a number'}") from None
    if not math.isfinite(number) or number <= 0:
        raise BadSetting(name, text, "expected a number above 0")
    return number


def documentation() -> list[tuple[str, str, str]]:
    """(variable, default, meaning) for each setting, read from the docstrings above."""
    nodes = ast.parse(textwrap.dedent(inspect.getsource(Settings))).body[0].body  # type: ignore[attr-defined]
    rows = []
    for node, following in itertools.pairwise(nodes):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
            meaning = " ".join(ast.literal_eval(following.value).split())
            rows.append((f"TORCHLOOM_{name.upper()}", str(getattr(Settings, name)), meaning))
    return rows


def usable_settings(environ: Mapping[str, str]) -> Settings:
    """The settings of the environment. An invalid variable is logged and ignored."""
    usable = dict(environ)
    while True:
        try:
            return Settings.from_env(usable)
        except BadSetting as error:
            logging.getLogger("torchloom").warning("torchLoom: %s; the default is used", error.message)
            if usable.pop(error.name, None) is None:
                return Settings()

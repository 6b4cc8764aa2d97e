"""The weaver's HTTP endpoint for a monitoring system: it receives Alertmanager's webhook.

    POST /alertmanager   with `Authorization: Bearer TOKEN`: 200 once every fact is on the server's disk
    GET  /healthz        200 `ok`

Alertmanager repeats what is answered with 5xx and drops what is answered with 4xx. The answer is therefore 503 whenever
a fact could not be stored, and 4xx only for a request that can never be accepted. A stored fact takes the way of every
other fact: through the inbox, to `decide`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
from collections import Counter

import h11
import nats.errors
import nats.js.errors
from nats.aio.client import Client

from torchloom.bus.state_folder import StateFolder
from torchloom.bus.tasks import TaskSet
from torchloom.core.devices.alert_targets import AlertTargets, devices_blamed_by
from torchloom.core.state.cluster import ClusterState
from torchloom.errors import BadInput, BadState, TorchLoomError
from torchloom.integrations import alertmanager
from torchloom.integrations.alertmanager import Alarm
from torchloom.protocol.codec import encode
from torchloom.protocol.facts import DeviceFailed, DeviceRecovered, DeviceWarned
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.protocol.subjects import FACT
from torchloom.settings import Settings
from torchloom.shared.addresses import join_address
from torchloom.views.wording.phrases import render, render_all
from torchloom.weaver.health import Health
from torchloom.weaver.http_server import SLOW_SECONDS, Answer, Refusal, converse
from torchloom.weaver.ingress_config import PATH, certificate, ensure_token, last_place, port_of, remember_place

log = logging.getLogger("torchloom.weaver")

MOST_FACTS = 10_000
"""Most facts of one post: an alert about a machine is one fact for each of its devices."""
MOST_CONNECTIONS = 32
STORE_SECONDS = 10.0
"""Time for the facts of a post to be stored."""
AT_ONCE = 64
"""Most facts that are being stored at the same time."""
AGAIN_SECONDS = 1.0
"""Seconds between attempts to listen on a port that is in use, such as by the previous weaver."""
TURNS_KEPT = 20_000
MOST_DOUBTS = 20
"""Most doubts in one answer."""
METHODS = {PATH: "POST", "/healthz": "GET"}
AlarmFact = tuple[Alarm, DeviceFailed | DeviceRecovered | DeviceWarned]


class Ingress:
    def __init__(self, settings: Settings, client: Client, cluster: ClusterState, health: Health) -> None:
        if not 0 <= settings.ingress_port <= 65535:
            raise BadInput(f"TORCHLOOM_INGRESS_PORT: {settings.ingress_port} is not a port")
        self._settings = settings
        self._folder = StateFolder(settings.state_folder)
        self._client = client
        self._js = client.jetstream(timeout=STORE_SECONDS / 2)
        self._cluster = cluster
        self._health = health
        self._certificate = certificate(settings)
        self._token = b""
        self._server: asyncio.Server | None = None
        self._tasks = TaskSet()
        self._connections = 0
        self._turns: dict[str, tuple[bool, str]] = {}
        self.slow_seconds = SLOW_SECONDS
        self.url = ""
        """Where alerts are received; empty if they are not."""
        self.trouble: Prose = ""
        """Why they are not received."""

    # ── opening and closing ──

    async def open(self) -> None:
        """Start to listen. Without an ingress the weaver still works, and reports it; a port in use is tried again."""
        try:
            self._token = ensure_token(self._settings).encode()
        except TorchLoomError as error:
            self._say_why_not(error.message)
            return
        if not await self._listen():
            self._tasks.start(self._listen_later())

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._tasks.end()

    async def _listen_later(self) -> None:
        listening = False
        while not listening:
            await asyncio.sleep(AGAIN_SECONDS)
            listening = await self._listen()

    async def _listen(self) -> bool:
        host, before = self._settings.ingress_host, last_place(self._folder)
        port = self._settings.ingress_port or port_of(before)
        patience = None if self._certificate is None else SLOW_SECONDS
        try:
            self._server = await asyncio.start_server(
                self._accept, host, port, ssl=self._certificate, ssl_handshake_timeout=patience
            )
        except OSError as error:
            self._say_why_not(f"{host}:{port}: {error.strerror or error}")
            return False
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"{'https' if self._certificate else 'http'}://{join_address(host, port)}{PATH}"
        self.trouble = ""
        if self.url != before:
            with contextlib.suppress(BadState):  # then the next weaver takes another port
                remember_place(self._folder, self.url)
        log.info("alerts are taken at %s", self.url)
        return True

    def _say_why_not(self, why: str) -> None:
        trouble = phrase("no_alerts_taken", why=why)
        if trouble != self.trouble:
            log.warning("%s", render(trouble))
        self.trouble = trouble

    # ── one request ──

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.keep(task)
        self._connections += 1
        try:
            with contextlib.suppress(OSError, h11.ProtocolError):  # the client went away; a timeout is an OSError too
                await converse(reader, writer, self._admit, self._respond, self.slow_seconds)
        finally:
            self._connections -= 1
            writer.close()

    def _admit(self, request: h11.Request) -> None:
        if self._connections > MOST_CONNECTIONS:
            raise Refusal(Answer(503, "too many connections; try again"))
        path = _path(request)
        method = METHODS.get(path)
        if method is None:
            raise Refusal(Answer(404, f"not found; alerts go to {PATH}"))
        if request.method.decode() != method:
            raise Refusal(Answer(405, f"{path} takes {method}", (("Allow", method),)))
        if path != PATH:
            return
        kind, _, token = dict(request.headers).get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer" or not hmac.compare_digest(token.strip(), self._token):
            self._health.refuse(phrase("alert_without_token"))
            text = "the token is missing or wrong; `loom token ingress` prints it"
            raise Refusal(Answer(401, text, (("WWW-Authenticate", "Bearer"),)))

    async def _respond(self, request: h11.Request, body: bytes) -> Answer:
        if _path(request) != PATH:
            return Answer(200, "ok")
        try:
            alarms = alertmanager.read(body)
            facts, doubts = self._facts(alarms)
        except BadInput as error:
            self._health.refuse(phrase("not_accepted", what="alert", why=error.message))
            return Answer(400, error.message)
        try:
            async with asyncio.timeout(STORE_SECONDS):
                await self._store(facts)
        except (nats.errors.Error, nats.js.errors.Error, OSError) as error:
            why = str(error) or type(error).__name__
            log.warning("alerts could not be stored: %s", why)
            return Answer(503, f"not stored ({why}); try again")
        lines = [
            phrase("facts_stored", count=len(facts)),
            *(_counted(doubts) if alarms else [phrase("alerts_harmless")]),
        ]
        return Answer(200, "\n".join(render_all(lines)))

    # ── what alerts say ──

    def _facts(self, alarms: list[Alarm]) -> tuple[list[AlarmFact], list[Phrase]]:
        """The facts, one for each device of an alert, and what keeps an alert from having an effect.

        A resolved alert is also about devices that it made fail. A fact about an unknown device is stored too: the
        device may be known when the fact is decided on.
        """
        hosts = AlertTargets(self._cluster)
        failed = devices_blamed_by(self._cluster, [alarm.id for alarm in alarms if not alarm.firing])
        facts: list[AlarmFact] = []
        doubts: list[Phrase] = []
        for alarm in alarms:
            devices = (alarm.uuid,) if alarm.uuid else hosts.named(alarm.part) or hosts.devices(alarm.hosts)
            devices = tuple(dict.fromkeys((*devices, *failed.get(alarm.id, ()))))
            if not devices and alarm.firing:
                self._health.refuse(phrase("alert_about_nobody", alert=alarm.name))
                doubts.append(phrase("alert_names_nobody", alert=alarm.name))
            elif alarm.firing and alarm.uuid and not hosts.named(alarm.uuid):
                doubts.append(phrase("alert_names_unknown", alert=alarm.name, device=alarm.uuid))
            facts += [(alarm, alarm.about(device)) for device in devices]
            if len(facts) > MOST_FACTS:
                raise BadInput(f"alerts about more than {MOST_FACTS:,} devices at once")
        return facts, doubts

    async def _store(self, facts: list[AlarmFact]) -> None:
        """Store resolved alerts first, then firing ones. The server recognises repetitions by their id."""
        if facts and not self._client.is_connected:
            raise nats.errors.ConnectionClosedError
        room = asyncio.Semaphore(AT_ONCE)

        async def publish(alarm: Alarm, fact: DeviceFailed | DeviceRecovered | DeviceWarned) -> None:
            subject, key = FACT.to(source=f"alertmanager:{alarm.id}"), f"{self._key(alarm)}/{fact.device}"
            async with room:
                await self._js.publish(subject, encode(fact), headers={"Nats-Msg-Id": key})

        for firing in (False, True):
            await asyncio.gather(*(publish(*fact) for fact in facts if fact[0].firing is firing))

    def _key(self, alarm: Alarm) -> str:
        """The id of a state of an alert: the same while it is repeated, another one when it fires again.

        Without the random turn, an alert that fires, is resolved and fires again within the server's window for
        duplicates would count as a repetition. A new weaver stores a repetition once more; `decide` ignores it.
        """
        firing, turn = self._turns.get(alarm.id, (alarm.firing, ""))
        if not turn or firing is not alarm.firing:
            if len(self._turns) >= TURNS_KEPT:
                self._turns.clear()
            turn = secrets.token_hex(4)
            self._turns[alarm.id] = (alarm.firing, turn)
        return f"{alarm.key}-{turn}"


def _counted(doubts: list[Phrase]) -> list[Phrase]:
    """Each doubt once, with the number of its alerts."""
    counts = Counter(map(str, doubts))
    each = {str(doubt): doubt for doubt in doubts}
    lines = [
        phrase("doubt_counted", doubt=doubt, count=counts[key]) if counts[key] > 1 else doubt
        for key, doubt in each.items()
    ]
    more = len(lines) - MOST_DOUBTS
    return lines if more <= 0 else [*lines[:MOST_DOUBTS], phrase("and_more", count=more)]


def _path(request: h11.Request) -> str:
    return request.target.partition(b"?")[0].decode()

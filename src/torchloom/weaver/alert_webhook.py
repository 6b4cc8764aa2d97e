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
import secrets
import ssl
from collections import Counter
from pathlib import Path

import h11
import msgspec
import nats.errors
from nats.aio.client import Client

from torchloom.bus.state_folder import Endpoint, StateFolder, write_private
from torchloom.bus.streams import store_once
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
from torchloom.shared.addresses import is_loopback, join_address, split_url
from torchloom.shared.json_decoding import decoder
from torchloom.views.wording.phrases import render, render_all
from torchloom.weaver.health import Health, log
from torchloom.weaver.http_server import SLOW_SECONDS, Answer, converse

PATH = "/alertmanager"
LEAST_TOKEN = 16
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
        self._cluster = cluster
        self._health = health
        self._certificate = certificate(settings)
        self._token = b""
        self._server: asyncio.Server | None = None
        self._tasks = TaskSet()
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
        await asyncio.sleep(AGAIN_SECONDS)
        while not await self._listen():
            await asyncio.sleep(AGAIN_SECONDS)

    async def _listen(self) -> bool:
        host, before = self._settings.ingress_host, last_place(self._folder)
        port = self._settings.ingress_port or (split_url(before)[1] if before else 0)
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
            with contextlib.suppress(BadState):  # the next weaver takes this address too, or else another port
                write_private(self._folder.ingress, msgspec.json.encode({"url": self.url}))
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
        with contextlib.closing(writer), contextlib.suppress(OSError, h11.ProtocolError):
            # An error means that the client went away; a timeout is an OSError too.
            await converse(reader, writer, self._admit, self._respond, self.slow_seconds)

    def _admit(self, request: h11.Request) -> None:
        if len(self._tasks) > MOST_CONNECTIONS:
            raise Answer(503, "too many connections; try again")
        path = request.target.partition(b"?")[0].decode()
        method = METHODS.get(path)
        if method is None:
            raise Answer(404, f"not found; alerts go to {PATH}")
        if request.method.decode() != method:
            raise Answer(405, f"{path} takes {method}", (("Allow", method),))
        if path != PATH:
            raise Answer(200, "ok")
        kind, _, token = dict(request.headers).get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer" or not hmac.compare_digest(token.strip(), self._token):
            self._health.refuse(phrase("alert_without_token"))
            text = "the token is missing or wrong; `loom token ingress` prints it"
            raise Answer(401, text, (("WWW-Authenticate", "Bearer"),))

    async def _respond(self, body: bytes) -> Answer:
        try:
            alarms = alertmanager.read(body)
            facts, doubts = self._facts(alarms)
        except BadInput as error:
            self._health.refuse(phrase("not_accepted", what="alert", why=error.message))
            return Answer(400, error.message)
        try:
            async with asyncio.timeout(STORE_SECONDS):
                await self._store(facts)
        except (nats.errors.Error, OSError) as error:
            why = str(error) or type(error).__name__
            log.warning("alerts could not be stored: %s", why)
            return Answer(503, f"not stored ({why}); try again")
        more = _counted(doubts) if alarms else [phrase("alerts_harmless")]
        return Answer(200, "\n".join(render_all([phrase("facts_stored", count=len(facts)), *more])))

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
                await store_once(self._client, subject, encode(fact), key, timeout=STORE_SECONDS / 2)

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


# ── configuration: token, address, certificate ──


def ensure_token(settings: Settings) -> str:
    """The token that alerts must contain, created on first use."""
    folder = StateFolder(settings.state_folder)
    if not settings.ingress_token and not folder.ingress_token.exists():
        folder.make()
        write_private(folder.ingress_token, f"{secrets.token_urlsafe(32)}\n".encode())
    return read_token(settings)


def read_token(settings: Settings) -> str:
    """The token, if it was created; else BadState."""
    own = Path(settings.ingress_token).expanduser() if settings.ingress_token else None
    path = own or StateFolder(settings.state_folder).ingress_token
    try:
        token = path.read_text().strip()
    except FileNotFoundError:
        hint = "mend TORCHLOOM_INGRESS_TOKEN" if own else "the weaver makes it: run this where `loom up` runs"
        raise BadState(f"there is no file {path}", hint=hint) from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadState(f"cannot read the token in {path}: {error}") from error
    if len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable():
        raise BadState(
            f"{path} holds no token: it takes {LEAST_TOKEN} printable characters or more",
            hint="write one there" if own else f"remove {path}; the next `loom up` creates another one",
        )
    return token


def last_place(folder: StateFolder) -> str:
    """Where the weaver of this folder last received alerts; empty if it never has."""
    try:
        return decoder(Endpoint)(folder.ingress.read_bytes()).url
    except (OSError, msgspec.MsgspecError):
        return ""


def certificate(settings: Settings) -> ssl.SSLContext | None:
    """The certificate to listen with, if any. Refuses to listen beyond this machine without one."""
    cert, key = settings.ingress_cert, settings.ingress_key
    if bool(cert) != bool(key):
        raise BadInput("TORCHLOOM_INGRESS_CERT and TORCHLOOM_INGRESS_KEY belong together", hint="set both, or neither")
    if cert:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(Path(cert).expanduser(), Path(key).expanduser())
        except (OSError, ssl.SSLError) as error:
            raise BadInput(f"the certificate {cert} and its key cannot be used: {error}") from error
        return context
    if not is_loopback(settings.ingress_host):
        raise BadInput(
            f"refusing to take alerts on {settings.ingress_host} without TLS: the token could be read on its way",
            hint="set TORCHLOOM_INGRESS_CERT and TORCHLOOM_INGRESS_KEY, or leave TORCHLOOM_INGRESS_HOST on loopback",
        )
    return None

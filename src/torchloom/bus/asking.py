"""Asking the weaver: to see (`look`), or to have something done (`ask`). What the command line and other views use."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import msgspec
import nats.errors
from nats.aio.client import Client

from torchloom import messages
from torchloom.bus.client import connect, find
from torchloom.errors import Refused, TorchLoomError, Unreachable
from torchloom.messages import Ask, CurvesView, Done, FabricView, Look, LookCurves, LookFabric, No
from torchloom.settings import Settings
from torchloom.subjects import ASK, LOOK, Role

PAGE = 1000
"""Ranks in one picture; the weaver gives no more at once."""


class Asking:
    """A connection with one role: `async with Asking(settings, Role.VIEWER) as weaver: await weaver.fabric()`."""

    client: Client

    def __init__(self, settings: Settings, role: Role, *, timeout: float = 5.0, connect_timeout: float = 2.0) -> None:
        self._settings = settings
        self._role = role
        self._timeout = timeout
        self._connect_timeout = connect_timeout

    async def __aenter__(self) -> Self:
        address = find(self._settings, self._role)
        self.client = await connect(address, name=f"loom {self._role}", timeout=self._connect_timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.client.close()

    async def fabric(self, job: str | None = None, most: int | None = None) -> FabricView:
        """The whole picture, its ranks gathered from as many pages as they fill, up to `most`."""
        view = await self._page(job, 0, most)
        ranks, seats = list(view.ranks), list(view.seats)
        wanted = view.total_ranks if most is None else min(most, view.total_ranks)
        while len(ranks) < wanted:
            page = await self._page(job, len(ranks), wanted - len(ranks))
            if not page.ranks:
                break  # some left while we were reading
            ranks += page.ranks
            seats += page.seats
        return msgspec.structs.replace(view, ranks=tuple(ranks), seats=tuple(dict.fromkeys(seats)))

    async def curves(self, job: str, replica: str | None = None, most: int | None = None) -> CurvesView:
        """The history of each rank of a job, from as many pages as it fills."""
        gathered: list[object] = []
        total = 1
        while len(gathered) < (total if most is None else min(most, total)):
            limit = 100 if most is None else min(100, most - len(gathered))
            answer = await self.look(LookCurves(job=job, replica=replica, offset=len(gathered), limit=limit))
            if not isinstance(answer, CurvesView):
                raise _unexpected(answer)
            total = answer.total
            if not answer.curves:
                break
            gathered += answer.curves
        return CurvesView(curves=tuple(gathered), total=total if gathered else 0)  # type: ignore[arg-type]

    async def look(self, look: Look) -> object:
        return await self._request(LOOK.to(), look)

    async def ask(self, ask: Ask) -> Done:
        """Have it done; Refused if the weaver says no."""
        answer = await self._request(ASK.to(), ask)
        if isinstance(answer, Done):
            return answer
        raise _unexpected(answer)

    async def _page(self, job: str | None, offset: int, most: int | None) -> FabricView:
        limit = PAGE if most is None else min(PAGE, most)
        answer = await self.look(LookFabric(job=job, offset=offset, limit=limit))
        if isinstance(answer, FabricView):
            return answer
        raise _unexpected(answer)

    async def _request(self, subject: str, message: Ask | Look) -> object:
        try:
            reply = await self.client.request(subject, messages.encode(message), timeout=self._timeout)
        except nats.errors.NoRespondersError:
            raise Unreachable(
                "NATS is up, but the weaver does not answer", hint="start it with `loom up`, or `loom weaver` alone"
            ) from None
        except nats.errors.TimeoutError:
            raise Unreachable(
                f"the weaver does not answer within {self._timeout:g} s",
                hint="look at logs/weaver.log in the state folder; `loom doctor` checks the rest",
            ) from None
        except (nats.errors.Error, OSError) as error:
            raise Unreachable(f"the connection was lost while asking: {error}", hint="try again") from error
        try:
            answer: object = messages.decode_answer(reply.data)
        except msgspec.MsgspecError as error:
            raise TorchLoomError(
                f"the weaver's answer cannot be understood: {error}", hint="is it of another version of torchLoom?"
            ) from error
        if isinstance(answer, No):
            raise Refused(answer.why, hint=answer.hint)
        return answer


def _unexpected(answer: object) -> TorchLoomError:
    return TorchLoomError(f"the weaver answered with {type(answer).__name__}, which was not asked for")

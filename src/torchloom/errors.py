"""Every error torchLoom raises on purpose: what happened, what to do next, and the exit code that says it.

TorchLoomError            1  something went wrong
├── BadInput              2  what was typed or passed cannot be meant        (also a ValueError)
│   ├── BadName              a job, replica or device name with a character no subject can carry
│   ├── BadDataset           a dataset that an ElasticLoader cannot load       (also a TypeError)
│   └── BadSetting           an environment variable or option with an impossible value
├── Unreachable           3  no control plane answers there
├── Refused               4  the weaver understood, and said no
├── AlreadyUp             5  someone else is doing this already
│   └── PortInUse            another program listens there
├── BadState              6  the state folder or a credential cannot be used
├── Fenced                7  a newer weaver has taken over; this one must stop
├── LoaderDied            1  loader processes died while they loaded a batch   (also a RuntimeError)
├── LoaderInterrupted     1  an interrupt ended an iteration over a loader     (also a RuntimeError)
├── LoaderShortage        1  training has no descriptors or addresses left     (also a RuntimeError)
├── LoaderTimeout         1  no batch arrived within the timeout of a loader   (also a RuntimeError)
├── Damaged               8  a checkpoint must not be believed
└── NoValidCheckpoint     8  a folder has none that may be believed
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


class TorchLoomError(Exception):
    """Base of all errors here. ``hint`` says what to do next; the CLI prints it under the message."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint:
            self.add_note(f"→ {hint}")  # a traceback shows it

    def __reduce__(self) -> tuple[Any, ...]:
        """As it is, whatever its constructor takes: it may be raised again in another process."""
        return _again, (type(self), *self.args), self.__dict__


def _again(kind: type[TorchLoomError], *args: Any) -> TorchLoomError:
    return kind.__new__(kind, *args)


class BadInput(TorchLoomError, ValueError):
    exit_code = 2


class BadName(BadInput):
    def __init__(self, what: str, name: object) -> None:
        super().__init__(
            f"{what} {name!r} is not a name",
            hint="names have 1 to 128 characters out of A-Z a-z 0-9 _ : -",
        )
        self.what = what
        self.name = name


class BadSetting(BadInput):
    def __init__(self, name: str, value: object, why: str) -> None:
        super().__init__(f"{name}={value!r}: {why}")
        self.name = name
        self.value = value


class BadDataset(BadInput, TypeError):
    pass


class LoaderDied(TorchLoomError, RuntimeError):
    """Loader processes died: all on one batch, or all of them as soon as they started."""

    def __init__(self, batch: int | None, indices: Any, deaths: int, shard: str = "") -> None:
        """`shard`: which batch of which shard it is, of an IterableDataset."""
        if batch is None:
            super().__init__(
                f"{deaths} loader processes in a row died before they loaded a batch",
                hint="look for worker_init_fn in the stack of a core dump, and for a lack of memory or processes",
            )
        else:
            text = repr(indices)
            shown = text if len(text) <= 1000 else f"{text[:1000]}…"
            processes = "process" if deaths == 1 else "processes"
            where = shard or f"batch {batch}, indices {shown}"
            super().__init__(
                f"{deaths} loader {processes} died while loading {where}",
                hint="load these samples in a process of their own: native code may crash, or memory run out",
            )
        self.batch = batch
        self.indices = indices
        self.deaths = deaths


class LoaderInterrupted(TorchLoomError, RuntimeError):
    """KeyboardInterrupt, or an exception of another signal handler, came while a batch was received."""

    def __init__(self) -> None:
        super().__init__(
            "an interrupt came while this iteration received a batch: it cannot continue",
            hint="begin another one; load_state_dict(state_dict()) lets it continue after the last batch",
        )


class LoaderShortage(TorchLoomError, RuntimeError):
    """The training process has no file descriptor, thread or address space for its loaders. Nothing is lost."""

    def __init__(self, detail: str) -> None:
        super().__init__(
            f"the training process lacks what its loaders need: {detail}",
            hint="close files, end threads or raise the limit (ulimit -n, -u, -v); next() then continues there",
        )
        self.detail = detail


class LoaderTimeout(TorchLoomError, RuntimeError):
    def __init__(self, seconds: float, loader: int | None = None, wanted: str = "") -> None:
        """`wanted`: what this loader is loading."""
        doing = "" if loader is None else f"loader {loader} is loading {wanted}; "
        super().__init__(
            f"DataLoader timed out after {seconds} seconds",  # the words of torch
            hint=f"{doing}next() waits again, and a longer timeout= waits longer",
        )
        self.seconds = seconds
        self.loader = loader


class Unreachable(TorchLoomError):
    exit_code = 3


class Refused(TorchLoomError):
    """The weaver said no. ``code`` names the reason, for programs."""

    exit_code = 4

    def __init__(self, message: str, *, hint: str = "", code: str = "") -> None:
        super().__init__(message, hint=hint)
        self.code = code


class AlreadyUp(TorchLoomError):
    exit_code = 5


class PortInUse(AlreadyUp):
    def __init__(self, host: str, port: int, any_port: str) -> None:
        """`any_port`: what to type for a port that is free."""
        super().__init__(
            f"port {port} on {host} is in use by another program",
            hint=f"stop that program, or choose another port: `{any_port}` takes any free one",
        )
        self.host = host
        self.port = port


class BadState(TorchLoomError):
    exit_code = 6


class Fenced(TorchLoomError):
    exit_code = 7


class Damaged(TorchLoomError):
    """A checkpoint that must not be believed."""

    exit_code = 8

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path.name}: {why}", hint="it was left in place; an older one may be whole")
        self.path = path
        self.why = why


class NoValidCheckpoint(TorchLoomError):
    exit_code = 8

    def __init__(self, folder: Path, rejected: dict[str, str]) -> None:
        reasons = ", ".join(f"{name} ({why})" for name, why in list(rejected.items())[:5])
        more = f" and {len(rejected) - 5} more" if len(rejected) > 5 else ""
        super().__init__(
            f"no valid checkpoint in {folder}" + (f": {reasons}{more}" if rejected else ""),
            hint="" if rejected else "the folder holds nothing that looks like one",
        )
        self.folder = folder
        self.rejected = rejected

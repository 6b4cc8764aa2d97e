"""`loom run`: start a script on this machine, watch it, and start it again from its last checkpoint when it fails."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from torchloom.cli.verb_call import Call, Verbs
from torchloom.cli.verbs.jobs import add_rules, with_rules
from torchloom.errors import BadInput
from torchloom.job.job_file_reader import check_size, make_task, span
from torchloom.job.options_from_spec import add_options, declared_options, read_options
from torchloom.protocol.ids import check_name
from torchloom.protocol.job_spec import JobSettings, Task, Torchft

ANSWER_SECONDS = 2.0
"""For a lighthouse of the user to accept a connection."""

_TORCHRUN = {
    "--rdzv-backend": "ranks find each other without it",
    "--rdzv-endpoint": "ranks find each other without it",
    "--rdzv-id": "--job names the run",
    "--node-rank": "ranks are numbered by torchLoom; `loom agent` runs on each node, and `loom run` once",
    "--master-addr": "ranks find each other without it",
    "--master-port": "a free port is chosen for each attempt",
    "--monitor-interval": "leave it out: nothing is polled",
    "--role": "leave it out",
    "--redirects": "output is kept in files, and shown",
    "--tee": "output is kept in files, and shown",
}


def add(verbs: Verbs) -> None:
    verb = verbs["run"].define(
        run,
        "loom run --nproc-per-node 2 --checkpoint-dir runs/a train.py --epochs 20",
        "loom run -m package.train",
        "loom run --torchft --replicas 2 train_ddp.py",
        output=False,
    )
    verb.set_defaults(words=[])
    verb.usage = "loom run [options] SCRIPT [ARGS ...]\n       loom run [options] -m MODULE [ARGS ...]"
    verb.add_argument(
        "--nproc-per-node", default="auto", metavar="N",
        help="Ranks on each node; auto: one for each GPU, else 1; MIN:MAX: a restart takes what is there, at least MIN",
    )  # fmt: skip
    nodes = "Nodes; more than 1: on machines that run `loom agent`; MIN:MAX as above; default: 1"
    verb.add_argument("--nnodes", default="1", metavar="N", help=nodes)
    verb.add_argument("--job", metavar="NAME", help="Name of the job; default: the name of the script")
    add_options(verb, JobSettings)
    verb.add_flag(
        "--torchft", help="Start replicas of a script that uses torchft; each restarts alone while the others train"
    )
    add_options(verb, Torchft)
    add_rules(verb)
    verb.add_argument("-m", dest="module", metavar="MODULE", help="Run a module, as `python -m` does")


def split(verb: argparse.ArgumentParser, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """What is for `loom`, and what is for the script: from the first word that is no option of ours."""
    options = {option: action for action in verb._actions for option in action.option_strings}
    start = list(words).index("run") + 1
    ours, rest = list(words[:start]), list(words[start:])
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        dashed = name.replace("_", "-")  # torchrun takes both spellings
        if word == "--":
            break
        if name == "--standalone":  # what this always is
            continue
        if not name.startswith("-") or name == "-":
            return ours, [word, *rest]
        if dashed in _TORCHRUN:
            raise BadInput(f"`loom run` has no option {name}", hint=_TORCHRUN[dashed])
        if name not in options and dashed not in options:
            return [*ours, word, *rest], []  # the parser says what is wrong with it
        name = name if name in options else dashed
        ours.append(f"{name}{equals}{value}")
        if options[name].nargs != 0 and not equals:
            ours += rest[:1]
            del rest[:1]
        if name == "-m":
            break
    return ours, rest


def run(call: Call) -> int:
    """Options of `loom run` come before the script, its own arguments after it. A script that runs under torchrun
    runs here unchanged. Without a control plane it starts its own. Ctrl-C ends the job cleanly, a second one
    kills it.
    """
    from torchloom.client import operator
    from torchloom.launcher import local_run
    from torchloom.launcher.run_control import LaunchRequest, RunFollower
    from torchloom.threadlet.process.identity import sanitised, script_name

    args = call.args
    task = with_rules(_task(call), args)
    name = args.job or (sanitised(args.module) if args.module else script_name(args.words[0]))
    check_name("job", name)
    if where := silent_lighthouse(task):
        call.note(f"no lighthouse answers at {where}: replicas wait for it, and end if it does not come")
    if task.nodes == 1:
        logs = task.log_dir or str(local_run.output_folder(call.settings, name, time.time()))
        task = replace(task, log_dir=logs)
    request = LaunchRequest(name, task, operator(), colour=call.screen.colour)
    return call.wait(
        local_run.run(call.settings, request) if task.nodes == 1 else RunFollower(call.settings, request).follow()
    )


def _task(call: Call) -> Task:
    from torchloom.agent.node import this_node

    args = call.args
    if args.module:
        argv = ("-m", args.module, *args.words)
    elif args.words:
        script = Path(args.words[0])
        if not script.is_file():
            raise BadInput(f"there is no script {script}", hint="`loom run [options] script.py [arguments]`")
        argv = tuple(args.words)
    else:
        raise BadInput("nothing to run", hint="`loom run [options] script.py [arguments]`")
    node = this_node()
    least, count = _counts(args.nproc_per_node, len(node.devices))
    min_nodes, nodes = span("--nnodes", args.nnodes)
    settings = read_options(args, JobSettings)
    if settings.get("log_dir"):
        settings["log_dir"] = str(Path(settings["log_dir"]).absolute())
    task = make_task(
        {"node": f"{node.name[:100]}-run-{os.getpid()}" if nodes == 1 else None, **settings},
        argv=argv,
        cwd=os.getcwd(),  # noqa: PTH109
        per_node=count,
        least=least,
        nodes=nodes,
        min_nodes=min_nodes,
        attended=nodes == 1,
    )
    return check_size(with_replicas(task, args, len(node.devices)))


def _counts(text: str, gpus: int) -> tuple[int | None, int]:
    """How many ranks at least, if fewer will do, and how many."""
    least, colon, most = text.partition(":")
    if not colon:
        return None, _count(text, gpus)
    return span("--nproc-per-node", f"{least}:{_count(most, gpus)}")


def _count(text: str, gpus: int) -> int:
    if text == "gpu" and not gpus:
        raise BadInput("--nproc-per-node gpu, and there is no GPU", hint="a number, or auto: one for each GPU, else 1")
    if text in {"auto", "gpu"}:
        return gpus or 1
    if text == "cpu":
        return os.cpu_count() or 1
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise BadInput(f"--nproc-per-node {text!r}", hint="a number from 1 to 1024, or auto")
    if gpus and int(text) > gpus:
        raise BadInput(f"{text} ranks and {gpus} GPUs", hint=f"--nproc-per-node {gpus}, or hide the GPUs from it")
    return int(text)


def with_replicas(task: Task, args: argparse.Namespace, gpus: int) -> Task:
    """What the options say about replicas."""
    from torchloom.job.replicas import as_replicas

    given = {
        field.name: value for field in declared_options(Torchft) if (value := getattr(args, field.name)) is not None
    }
    if args.torchft:
        return as_replicas(task, given, gpus, os.environ)
    if given:
        option = f"--{next(iter(given)).replace('_', '-')}"
        raise BadInput(f"{option} is for jobs under torchft", hint="add --torchft")
    return task


def silent_lighthouse(task: Task) -> str:
    """The address of the user's own lighthouse, if nobody answers there: replicas would wait without a message."""
    import socket
    from urllib.parse import urlsplit

    where = urlsplit(task.torchft.lighthouse) if task.torchft is not None else urlsplit("")
    if where.hostname is None or where.port is None:
        return ""
    try:
        socket.create_connection((where.hostname, where.port), ANSWER_SECONDS).close()
    except OSError:
        return f"{where.hostname}:{where.port}"
    return ""

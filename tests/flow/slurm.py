"""A real Slurm on loopback, of Debian's packages: munged, slurmctld, and two slurmd as two nodes on one machine."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel")
SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
CONFIG = """
ClusterName=loom
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
KillWait=10
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


class NoSlurm(Exception):
    pass


class Slurm:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        here = str(Path(sys.executable).parent)
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHLOOM_", "SLURM"))}
        self.env |= {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{here}:{os.environ.get('PATH', '')}:{SBIN}"}
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        missing = [name for name in PROGRAMS if shutil.which(name, path=self.env["PATH"]) is None]
        if missing or os.getuid() != 0:
            what = f"{', '.join(missing)} not installed (apt-get install slurm-wlm munge)" if missing else "not root"
            raise NoSlurm(f"no Slurm can be started here: {what}")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        for name in ("state", "spool-n1", "spool-n2"):
            (self.folder / name).mkdir()
        text = CONFIG.format(host=socket.gethostname().partition(".")[0], folder=self.folder, ports=free_ports(3))
        (self.folder / "slurm.conf").write_text(text)
        paths = [f"--{what}-file={self.folder}/munge.{what}" for what in ("key", "pid", "log", "seed")]
        self._daemon("munged", "--foreground", "--force", f"--socket={self.folder}/munge.sock", *paths)
        self._until((self.folder / "munge.sock").exists, "munged")
        self._daemon("slurmctld", "-D")
        for node in ("n1", "n2"):
            self._daemon("slurmd", "-D", "-N", node)
        self._until(lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() == "2", "two idle nodes")

    def _daemon(self, *words: str) -> None:
        with (self.folder / "daemons.log").open("ab") as log:
            self.processes.append(subprocess.Popen(words, env=self.env, stdout=log, stderr=log))

    def _until(self, what: Callable[[], bool], wanted: str, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not what():
            if time.monotonic() > end or any(process.poll() is not None for process in self.processes):
                last = (self.folder / "daemons.log").read_text(errors="replace").splitlines()[-3:]
                raise NoSlurm(f"Slurm did not start here ({wanted}): {' / '.join(last)}")
            time.sleep(0.1)

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words,
            env=self.env | env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=200,
            stdin=subprocess.DEVNULL,
        )

    def submit(self, *words: str, **env: str) -> str:
        """An allocation; its number."""
        done = self.run("sbatch", "--parsable", "--output", "%j.txt", *words, **env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def printed(self, number: str) -> str:
        path = self.folder / f"{number}.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def over(self, number: str) -> bool:
        return not self.run("squeue", "-h", "-j", number).stdout.strip()

    def left(self, number: str) -> list[psutil.Process]:
        """Processes that were started in an allocation."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get("SLURM_JOB_ID") == number and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def close(self) -> None:
        if len(self.processes) > 1:
            self.run("scancel", "--user", "root")
            with contextlib.suppress(NoSlurm):
                self._until(lambda: not self.run("squeue", "-h").stdout.strip(), "an empty queue")
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_ports(count: int) -> list[int]:
    """Of those that the kernel gives to nobody by itself, so that they are still free when they are used."""
    found: list[int] = []
    for port in random.SystemRandom().sample(range(12_000, 32_000), 1000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"no {count} free ports")


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Raises NoSlurm where there cannot be one."""
    one = Slurm(folder)
    try:
        one.start()
        yield one
    finally:
        one.close()

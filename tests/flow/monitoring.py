"""A real Prometheus and a real Alertmanager on loopback, with the rules and the receiver of docs/, and GPUs made up."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import yaml

from tests.flow.slurm import free_ports

DOCS = Path(__file__).parent.parent.parent / "docs"
PROGRAMS = ("prometheus", "prometheus-alertmanager", "promtool", "amtool")
HOST = "gpu-host"


def missing() -> str:
    """What has to be installed first; empty if all is there."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"{', '.join(absent)} not installed (apt-get install prometheus prometheus-alertmanager)" if absent else ""


class Exporter:
    """What dcgm-exporter would say of some GPUs. Set `xid` and the next scrape sees it."""

    def __init__(self, gpus: list[str]) -> None:
        self.xid = dict.fromkeys(gpus, 0)
        exporter = self

        class Page(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = exporter.page().encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def page(self) -> str:
        lines = []
        for number, (uuid, xid) in enumerate(self.xid.items()):
            labels = f'gpu="{number}",UUID="{uuid}",device="nvidia{number}",Hostname="{HOST}",modelName="NVIDIA H100"'
            lines += [f"DCGM_FI_DEV_XID_ERRORS{{{labels}}} {xid}", f"DCGM_FI_DEV_GPU_TEMP{{{labels}}} 40"]
        return "\n".join(lines) + "\n"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class Monitoring:
    def __init__(self, folder: Path, exporter: Exporter, webhook: str, token: str) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "token").write_text(token)
        self.processes: list[subprocess.Popen[bytes]] = []
        ports = free_ports(2)
        self.alertmanager = f"http://127.0.0.1:{ports[1]}"
        self._write_prometheus(exporter.port, ports[1])
        self._write_alertmanager(webhook)
        self._start(
            "prometheus", f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{ports[0]}",
        )  # fmt: skip
        self._start(
            "prometheus-alertmanager", f"--config.file={folder / 'alertmanager.yaml'}",
            f"--storage.path={folder / 'alerts'}", f"--web.listen-address=127.0.0.1:{ports[1]}",
            "--cluster.listen-address=",
        )  # fmt: skip

    def _write_prometheus(self, exporter: int, alertmanager: int) -> None:
        """Quicker than one would have it; the rules as they are. A scrape that takes too long ends the alerts."""
        config = {
            "global": {"scrape_interval": "3s", "scrape_timeout": "3s", "evaluation_interval": "200ms"},
            "rule_files": [str(DOCS / "prometheus-rules.yaml")],
            "scrape_configs": [{"job_name": "dcgm", "static_configs": [{"targets": [f"127.0.0.1:{exporter}"]}]}],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{alertmanager}"]}]}]},
        }
        (self.folder / "prometheus.yaml").write_text(yaml.safe_dump(config))

    def _write_alertmanager(self, webhook: str) -> None:
        """That of docs/, with our address and token."""
        text = (DOCS / "alertmanager.yaml").read_text()
        text = re.sub(r"http://127\.0\.0\.1:\d+/alertmanager", webhook, text)
        text = text.replace("/etc/prometheus/torchloom.token", str(self.folder / "token"))
        text = text.replace("group_wait: 1s", "group_wait: 0s").replace("group_interval: 5s", "group_interval: 1s")
        (self.folder / "alertmanager.yaml").write_text(text)

    def _start(self, *words: str) -> None:
        with (self.folder / f"{words[0]}.log").open("wb") as output:
            self.processes.append(
                subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=self.folder)
            )

    def told_in_vain(self) -> bool:
        """Whether Alertmanager has posted something that was not taken."""
        with urllib.request.urlopen(f"{self.alertmanager}/metrics", timeout=5) as answer:
            found = re.search(r'_requests_failed_total\{integration="webhook"\} (\d+)', answer.read().decode())
        return found is not None and int(found[1]) > 0

    def log(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.log"))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def monitoring(folder: Path, exporter: Exporter, webhook: str, token: str) -> Iterator[Monitoring]:
    one = Monitoring(folder, exporter, webhook, token)
    try:
        yield one
    finally:
        one.close()
        exporter.close()

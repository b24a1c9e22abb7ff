"""A real Prometheus, and what it makes of rules and queries."""

import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pseudoreal_dev.machine.packages import unpacked

from tests.support.patience import wait_for
from tests.support.ports import free_port

SECONDS = 1
"""Seconds between two looks at a target."""


def program(name: str) -> str:
    """prometheus or promtool. Debian's package, without what it would start on this machine."""
    return str(unpacked("prometheus") / "usr/bin" / name)


def promtool(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([program("promtool"), *words], capture_output=True, text=True, timeout=120)


@dataclass(frozen=True)
class Prometheus:
    port: int

    def ask(self, path: str, **query: str) -> Any:
        """The data of an answer of its API. Raises urllib.error.HTTPError for a query that it cannot read."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[Any]:
        return list(self.ask("query", query=expression)["result"])

    def is_ready(self) -> bool:
        with suppress(OSError):
            return bool(self.ask("status/runtimeinfo"))
        return False


@contextmanager
def running(folder: Path, targets: Mapping[int, Mapping[str, str]], rules: Path) -> Iterator[Prometheus]:
    """Scrapes ports of this machine. `targets`: port -> labels of its series, as relabelings would add them."""
    static = [{"targets": [f"127.0.0.1:{port}"], "labels": dict(labels)} for port, labels in targets.items()]
    scraping = {"job_name": "pseudoreal", "honor_labels": True, "static_configs": static}
    interval = {"scrape_interval": f"{SECONDS}s", "evaluation_interval": f"{SECONDS}s"}
    config = {"global": interval, "rule_files": [str(rules)], "scrape_configs": [scraping]}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    prometheus = Prometheus(free_port())
    command = [program("prometheus"), f"--config.file={folder / 'prometheus.yaml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{prometheus.port}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        wait_for("Prometheus", prometheus.is_ready, (folder / "prometheus.log").read_text)
        yield prometheus
    finally:
        process.kill()
        process.wait()

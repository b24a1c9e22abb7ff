"""A real Prometheus, for testing rules and queries."""

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

from tests.support.documents import FENCE, ROOT
from tests.support.patience import wait_for
from tests.support.ports import free_port

SECONDS = 1
"""Seconds between two scrapes of a target."""


def program(name: str) -> str:
    """Return the path of prometheus or promtool, from Debian's package without its services."""
    return str(unpacked("prometheus") / "usr/bin" / name)


def promtool(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([program("promtool"), *words], capture_output=True, text=True, timeout=120)


def documented_scrape_configuration() -> dict[str, Any]:
    """Return the configuration that docs/monitoring.md shows for a Prometheus without its operator."""
    blocks = FENCE.findall((ROOT / "docs/monitoring.md").read_text())
    bodies = [yaml.safe_load(block) for language, block in blocks if language == "yaml"]
    (found,) = [body for body in bodies if "scrape_configs" in body]
    return dict(found)


@dataclass(frozen=True)
class Prometheus:
    port: int

    def ask(self, path: str, **query: str) -> Any:
        """Return the data of an API response. Raises urllib.error.HTTPError for an invalid query."""
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
    """Run Prometheus scraping ports of this machine. `targets` maps a port to the labels of its series, as relabeling
    would add them."""
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

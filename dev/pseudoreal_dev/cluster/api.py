"""Polling client for a Kubernetes API server."""

import http.client
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_dev.cluster.certificates import KeyPair
from pseudoreal_dev.machine import shell
from pseudoreal_dev.machine.errors import DevError
from pseudoreal_dev.machine.processes import Process, is_running

POLL_SECONDS = 0.1
PATIENCE_SECONDS = 300.0
"""Seconds to wait for a condition, enough for a slow machine."""


@dataclass(frozen=True)
class Server:
    """An API server, and a client certificate that it accepts."""

    address: str
    port: int
    authority: Path
    client: KeyPair

    @property
    def url(self) -> str:
        return f"https://{self.address}:{self.port}"

    def finds(self, path: str) -> bool:
        """Return whether GET `path` is answered with status 200. Proxies from the environment are ignored."""
        return self.get(path) is not None

    def get(self, path: str) -> bytes | None:
        """Return the body of GET `path`; None for another status than 200, or without an answer."""
        try:
            context = ssl.create_default_context(cafile=self.authority)
            context.load_cert_chain(self.client.certificate, self.client.key)
            connection = http.client.HTTPSConnection(self.address, self.port, timeout=5, context=context)
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
            connection.close()
        except (OSError, http.client.HTTPException):
            return None
        return body if response.status == 200 else None


def wait_until(condition: Callable[[], bool], what: str, needed: list[Process]) -> None:
    """Wait for a condition. Raises DevError, with the end of a log, as soon as a needed process ends, or after
    `PATIENCE_SECONDS`."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        for process in needed:
            if not is_running(process):
                raise DevError(f"{process.name} ended before {what}.\n{shell.tail(Path(process.log))}")
        if time.monotonic() > deadline:
            logs = "\n".join(shell.tail(Path(process.log)) for process in needed)
            raise DevError(f"{what} did not happen within {PATIENCE_SECONDS:.0f} s.\n{logs}")
        time.sleep(POLL_SECONDS)

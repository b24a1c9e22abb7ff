"""Where the torchruns of all pods of an execution meet, and how long one waits for the others."""

import socket
import time
from collections.abc import Callable, Mapping
from math import inf

import structlog

_JOIN_SECONDS = 7 * 24 * 3600
"""Seconds that torchrun waits for the other pods. What bounds that for pods that wait for a node is spec.deadlines, and
spec.hang.startSeconds for pods that run and do not meet."""
MEET_SECONDS = 30
"""Seconds that the pods have to meet for a restart in place. They all run; and one that noticed nothing hears of it
with its next report."""
_CONNECT_SECONDS, _LOG_SECONDS = 2.0, 60.0
_AGAIN_SECONDS, _MOST_SECONDS, _GROWTH = 0.1, 1.0, 1.5
"""Seconds between two tries, at first and at most."""

log = structlog.get_logger()


def rendezvous(environment: Mapping[str, str], restarts: int = 0) -> dict[str, str]:
    """Variables of torchrun for where the pods meet after so many restarts in place. Each has a port of its own: the
    torchrun of worker 0 before it may still listen, and whoever met it there would end with it.

    Whether this pod holds the rendezvous, as worker 0 does, is said: torchrun would compare names of hosts to find that
    out, and in its node's network a pod has the name of the node."""
    if environment.get("PET_RDZV_BACKEND") != "c10d":
        return {}
    is_host = "true" if environment.get("PET_NODE_RANK") == "0" else "false"
    if restarts == 0:
        return {"PET_RDZV_CONF": f"is_host={is_host},join_timeout={_JOIN_SECONDS}"}
    host, port = _place(environment)
    return {
        "PET_RDZV_CONF": f"is_host={is_host},join_timeout={MEET_SECONDS}",
        "PET_RDZV_ID": f"{environment['PET_RDZV_ID']}-{restarts}",
        "PET_RDZV_ENDPOINT": f"{host}:{port + restarts}",
    }


def meets_until(restarts: int) -> float:
    """The moment of CLOCK_MONOTONIC until which a pod waits for worker 0, after so many restarts in place."""
    return time.monotonic() + (MEET_SECONDS if restarts else inf)


def await_worker_0(environment: Mapping[str, str], gives_up: Callable[[], bool]) -> bool:
    """Waits until worker 0 answers, or the pod gives up: whether it answers. It may wait for a node for hours, and
    torchrun gives up after a minute."""
    if environment.get("PET_RDZV_BACKEND") != "c10d" or environment.get("PET_NODE_RANK") == "0":
        return True
    told, pause = time.monotonic(), _AGAIN_SECONDS
    while not gives_up():
        try:
            socket.create_connection(_place(environment), timeout=_CONNECT_SECONDS).close()
            return True
        except OSError as error:
            if time.monotonic() - told >= _LOG_SECONDS:
                told = time.monotonic()
                log.warning("waits_for_worker_0", endpoint=environment["PET_RDZV_ENDPOINT"], error=str(error))
            time.sleep(pause)
            pause = min(_MOST_SECONDS, pause * _GROWTH)
    return False


def _place(environment: Mapping[str, str]) -> tuple[str, int]:
    host, _, port = environment["PET_RDZV_ENDPOINT"].rpartition(":")
    return host, int(port)

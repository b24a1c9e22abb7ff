"""Where the torchruns of all pods of an execution meet, and how long one waits for the others."""

import socket
import time
from collections.abc import Callable, Mapping
from math import inf

import structlog
from pseudoreal_api.resolved.config import PhaseConfig

from pseudoreal_trainer.launch.place import Place

_JOIN_SECONDS = 7 * 24 * 3600
"""Seconds that torchrun waits for the other pods. What bounds that for pods that wait for a node is spec.deadlines, and
spec.hang.startSeconds for pods that run and do not meet."""
MEET_SECONDS = 30
"""Seconds that the pods have to meet for a restart in place. They all run; and one that noticed nothing hears of it
with its next report."""
SPARE_SECONDS = 90
"""The same where spare pods wait: the operator first finds out which pod is lost, and tells the others one by one, each
in the answer to its next report."""
_CONNECT_SECONDS, _LOG_SECONDS = 2.0, 60.0
_AGAIN_SECONDS, _MOST_SECONDS, _GROWTH = 0.1, 1.0, 1.5
"""Seconds between two tries, at first and at most."""

log = structlog.get_logger()


def rendezvous(environment: Mapping[str, str], config: PhaseConfig, place: Place) -> dict[str, str]:
    """Variables of torchrun for where the pods meet, and as which worker this one does. Each restart in place has a
    port and a name of its own: the torchrun of worker 0 before it may still listen, and whoever met it there would end
    with it. The key of the meeting follows from its name."""
    if environment.get("PET_RDZV_BACKEND") != "c10d":
        return {}
    worker = {"PET_NODE_RANK": str(place.worker)}
    if place.restart == 0:
        return worker | {"PET_RDZV_CONF": f"join_timeout={_JOIN_SECONDS}"}
    host, port = _place(environment)
    membership = f"-of-{place.membership}" if place.membership else ""
    return worker | {
        "PET_RDZV_CONF": f"join_timeout={meet_seconds(config)}",
        "PET_RDZV_ID": f"{environment['PET_RDZV_ID']}-{place.restart}{membership}",
        "PET_RDZV_ENDPOINT": f"{_host(host, place.host)}:{port + place.restart}",
    }


def meet_seconds(config: PhaseConfig) -> int:
    """Seconds that the pods have to meet for a restart in place."""
    return SPARE_SECONDS if config.spares else MEET_SECONDS


def meets_until(config: PhaseConfig, place: Place) -> float:
    """The moment of CLOCK_MONOTONIC until which a pod waits for worker 0."""
    return time.monotonic() + (meet_seconds(config) if place.restart else inf)


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


def _host(name: str, pod: int) -> str:
    """Name of the pod of a completion index, from that of pod 0 of the same Job."""
    first, dot, domain = name.partition(".")
    job = first.removesuffix("-0")
    return name if job == first else f"{job}-{pod}{dot}{domain}"


def _place(environment: Mapping[str, str]) -> tuple[str, int]:
    host, _, port = environment["PET_RDZV_ENDPOINT"].rpartition(":")
    return host, int(port)

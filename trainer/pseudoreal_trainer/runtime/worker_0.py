"""Address and time limits of the rendezvous of an execution's torchruns."""

import socket
import time
from collections.abc import Callable, Mapping
from math import inf

import structlog
from pseudoreal_api.resolved.config import PhaseConfig

from pseudoreal_trainer.runtime.place import Place

_JOIN_SECONDS = 7 * 24 * 3600
"""Seconds that torchrun waits for the other pods. The real limits are spec.deadlines for pods that wait for a node, and
spec.hang.startSeconds for pods that run and do not meet."""
MEET_SECONDS = 30
"""Seconds for the rendezvous of a restart in place. All pods run already; a pod that noticed nothing learns of the
restart with its next report."""
SPARE_SECONDS = 90
"""The same with spare pods: the operator first finds out which pod is lost, and tells the others one by one, each in
the answer to its next report."""
_CONNECT_SECONDS, _LOG_SECONDS = 2.0, 60.0
_AGAIN_SECONDS, _MOST_SECONDS, _GROWTH = 0.1, 1.0, 1.5
"""Seconds between two tries, at first and at most, and the growth from one try to the next."""

log = structlog.get_logger()


def rendezvous(environment: Mapping[str, str], config: PhaseConfig, place: Place) -> dict[str, str]:
    """Return the variables of torchrun for the address of the rendezvous and the worker index of this pod.

    Each restart in place has its own port and name: the earlier torchrun of worker 0 may still listen, and a pod that
    joined it would end with it. The key of the rendezvous follows from its name.
    """
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
    """Return the seconds for the rendezvous of a restart in place."""
    return SPARE_SECONDS if config.spares else MEET_SECONDS


def meets_until(config: PhaseConfig, place: Place) -> float:
    """Return the time of CLOCK_MONOTONIC until which a pod waits for worker 0."""
    return time.monotonic() + (meet_seconds(config) if place.restart else inf)


def await_worker_0(environment: Mapping[str, str], gives_up: Callable[[], bool]) -> bool:
    """Wait until worker 0 answers or the pod gives up. Return whether worker 0 answers. Worker 0 may wait for a node
    for hours, and torchrun would give up after a minute."""
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
    """Return the host name of the pod with this completion index, from the name of pod 0 of the same Job."""
    first, dot, domain = name.partition(".")
    job = first.removesuffix("-0")
    return name if job == first else f"{job}-{pod}{dot}{domain}"


def _place(environment: Mapping[str, str]) -> tuple[str, int]:
    host, _, port = environment["PET_RDZV_ENDPOINT"].rpartition(":")
    return host, int(port)

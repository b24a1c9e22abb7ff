"""Identity of a pod at a rendezvous: the worker index of the pod; name, address, key and time limits of the rendezvous.

Imports no torch.
"""

import hmac
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import structlog
from pseudoreal_api.names import RENDEZVOUS_SECRET, SECRET_BYTES
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.wire.reports import Membership

from pseudoreal_trainer.errors import InvalidJobError, TrainingError


@dataclass(frozen=True)
class RendezvousIdentity:
    """Identity of a pod in one rendezvous."""

    restart: int
    """Number of the restart in place that starts with this rendezvous; 0: the pods' first rendezvous."""
    worker: int
    """Worker index of the pod."""
    host: int
    """Completion index of the pod of worker 0. That pod hosts the rendezvous."""
    own_restarts: int
    """Number of further restarts in place that the pod may decide on by itself."""
    membership: int = 0
    """Number of the restart in place with which the present membership started; 0: worker N is pod N."""
    is_first: bool = False
    """Whether the pod has had no ranks yet. The other pods may then be yet to start, even if `membership` is not 0: a
    queue that takes all pods back and admits them again leaves the membership as it is."""

    def after_own_restart(self) -> "RendezvousIdentity | None":
        """Return the identity after a restart decided by the pod itself; None: no such restart is left."""
        if self.own_restarts == 0:
            return None
        return replace(self, restart=self.restart + 1, own_restarts=self.own_restarts - 1)


def initial_identity(config: PhaseConfig, index: int) -> RendezvousIdentity | None:
    """Return the identity of the pod with this completion index before any takeover; None: the pod is a spare."""
    return RendezvousIdentity(0, index, 0, config.in_place) if index < config.workers else None


def identity_in(membership: Membership, config: PhaseConfig, index: int) -> RendezvousIdentity | None:
    """Return the identity of the pod with this completion index in a membership; None: the pod is no member."""
    worker = membership.worker_of(index, config.workers)
    if worker is None:
        return None
    return RendezvousIdentity(
        membership.restart, worker, membership.pod_of(0), membership.own_restarts, membership.restart
    )


_JOIN_SECONDS = 7 * 24 * 3600
"""Seconds that the torchrun of a pod without earlier ranks waits for the other pods. The real limits are spec.deadlines
for pods that wait for a node, and spec.hang.startSeconds for pods that run and do not meet."""
RESTART_SECONDS = 30
"""Seconds for the rendezvous of a restart in place. All pods run already. A pod with running ranks learns of the
restart from the answer to its next report."""
SPARE_RESTART_SECONDS = 90
"""Seconds for the rendezvous of a restart in place in a job with spare pods. The operator first finds out which pod is
lost. Each other pod learns of the loss in the answer to its next report."""
_CONNECT_SECONDS, _LOG_SECONDS = 2.0, 60.0
_AGAIN_SECONDS, _MOST_PAUSE_SECONDS, _GROWTH = 0.1, 1.0, 1.5
"""First and longest pause between two tries, in seconds, and the growth factor of the pause."""

log = structlog.get_logger()


def rendezvous(environment: Mapping[str, str], config: PhaseConfig, identity: RendezvousIdentity) -> dict[str, str]:
    """Return the variables of torchrun for the address of the rendezvous and the worker index of this pod.

    Each restart in place has its own port and name, because the earlier torchrun of worker 0 may still listen: a pod
    that joined the earlier torchrun would end together with it. The key of the rendezvous is derived from the name.
    """
    if environment.get("PET_RDZV_BACKEND") != "c10d":
        return {}
    seconds = _JOIN_SECONDS if identity.is_first else rendezvous_seconds(config)
    worker = {"PET_NODE_RANK": str(identity.worker), "PET_RDZV_CONF": f"join_timeout={seconds}"}
    if identity.restart == 0:
        return worker
    host, port = _endpoint(environment)
    membership = f"-of-{identity.membership}" if identity.membership else ""
    return worker | {
        "PET_RDZV_ID": f"{environment['PET_RDZV_ID']}-{identity.restart}{membership}",
        "PET_RDZV_ENDPOINT": f"{_host(host, identity.host)}:{port + identity.restart}",
    }


def rendezvous_seconds(config: PhaseConfig) -> int:
    """Return the seconds for the rendezvous of a restart in place, in a pod that has had ranks."""
    return SPARE_RESTART_SECONDS if config.spares else RESTART_SECONDS


def rendezvous_deadline(config: PhaseConfig, identity: RendezvousIdentity) -> float:
    """Return the time, in seconds of CLOCK_MONOTONIC, until which a pod waits for worker 0. Infinity if the pod has had
    no ranks yet."""
    return time.monotonic() + (inf if identity.is_first else rendezvous_seconds(config))


def await_worker_0(environment: Mapping[str, str], gives_up: Callable[[], bool]) -> bool:
    """Wait until worker 0 answers or `gives_up` returns True. Return whether worker 0 answers. The pod of worker 0 may
    wait for a node for hours; without this function, torchrun would give up after a minute."""
    if environment.get("PET_RDZV_BACKEND") != "c10d" or environment.get("PET_NODE_RANK") == "0":
        return True
    logged, pause = time.monotonic(), _AGAIN_SECONDS
    while not gives_up():
        try:
            socket.create_connection(_endpoint(environment), timeout=_CONNECT_SECONDS).close()
            return True
        except OSError as error:
            if time.monotonic() - logged >= _LOG_SECONDS:
                logged = time.monotonic()
                log.warning("waits_for_worker_0", endpoint=environment["PET_RDZV_ENDPOINT"], error=str(error))
            time.sleep(pause)
            pause = min(_MOST_PAUSE_SECONDS, pause * _GROWTH)
    return False


def _host(name: str, pod: int) -> str:
    """Return the host name of the pod with this completion index, from the name of pod 0 of the same Job."""
    first, dot, domain = name.partition(".")
    job = first.removesuffix("-0")
    return name if job == first else f"{job}-{pod}{dot}{domain}"


def _endpoint(environment: Mapping[str, str]) -> tuple[str, int]:
    host, _, port = environment["PET_RDZV_ENDPOINT"].rpartition(":")
    return host, int(port)


_MOST_BYTES = 1024**2
"""Size limit of a Kubernetes Secret, and so of a file mounted from a Secret."""


def check_secret(environment: Mapping[str, str] = os.environ) -> None:
    """Check that the pod has the job's secret; do nothing if the execution has one pod. Raises InvalidJobError if
    the environment names no secret file, and TrainingError if the file cannot be read or is too short."""
    if int(environment.get("PET_NNODES", "1")) > 1:
        _read_secret(environment)


def rendezvous_key(environment: Mapping[str, str] = os.environ) -> bytes:
    """Return the 32-byte key of the rendezvous named in the environment.

    The name, and so the key, differs between executions, restarts in place and memberships: a worker of one rendezvous
    is rejected at every other. Raises the errors of `check_secret`.
    """
    name = environment["PET_RDZV_ID"].encode()
    return hmac.digest(_read_secret(environment), b"pseudoreal meeting\0" + name, "sha256")


def _read_secret(environment: Mapping[str, str]) -> bytes:
    path = environment.get(RENDEZVOUS_SECRET)
    if path is None:
        raise InvalidJobError(
            f"the workers of this phase meet by a secret of the job, and {RENDEZVOUS_SECRET} names no file with it:"
            " upgrade the operator to the release of this image, or set spec.pod.image, while the job is suspended, to"
            " the trainer of the operator's release"
        )
    try:
        with Path(path).open("rb") as file:
            secret = file.read(_MOST_BYTES)
    except OSError as error:
        raise TrainingError(f"the secret by which workers meet cannot be read: {error}") from error
    if len(secret) < SECRET_BYTES:
        raise TrainingError(
            f"the secret in {path} has {len(secret)} bytes, and {SECRET_BYTES} are needed: the operator did not make"
            " that Secret; delete it, and the next execution gets another one"
        )
    return secret

"""The secret of a job, and the key of one rendezvous derived from it. Imports no torch."""

import hmac
import os
from collections.abc import Mapping
from pathlib import Path

from pseudoreal_api.names import RENDEZVOUS_SECRET, SECRET_BYTES

from pseudoreal_trainer.errors import InvalidJobError, TrainingError

_MOST_BYTES = 1024**2
"""Size limit of a Kubernetes Secret, and so of a file of one."""


def check_secret(environment: Mapping[str, str] = os.environ) -> None:
    """Check that a pod with other pods to meet has the job's secret. Raises InvalidJobError if no file is named, and
    TrainingError if the file cannot be read or is too short."""
    if int(environment.get("PET_NNODES", "1")) > 1:
        _read_secret(environment)


def meeting_key(environment: Mapping[str, str] = os.environ) -> bytes:
    """Return the key of the rendezvous that the environment names, 32 bytes.

    Each execution, restart in place and membership has a rendezvous of another name, so a worker of one is refused at
    any other. Raises the errors of `check_secret`.
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

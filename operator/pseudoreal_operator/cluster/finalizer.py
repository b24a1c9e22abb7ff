"""Removal of the finalizer that releases up to 0.2 put on every job: a job that has it cannot be deleted."""

from typing import Any

import structlog
from pseudoreal_api.base import GROUP

from pseudoreal_operator.cluster.api import Api

FINALIZER = f"{GROUP}/cleanup"

log = structlog.get_logger()


def has_finalizer(metadata: dict[str, Any]) -> bool:
    return FINALIZER in (metadata.get("finalizers") or [])


async def take_off(api: Api, metadata: dict[str, Any]) -> None:
    # With resourceVersion, so that a finalizer that someone adds meanwhile is not lost.
    patch = {
        "resourceVersion": metadata["resourceVersion"],
        "finalizers": [finalizer for finalizer in metadata["finalizers"] if finalizer != FINALIZER],
    }
    await api.merge("PseudoRealJob", metadata["namespace"], metadata["name"], {"metadata": patch})
    log.info("finalizer_removed", job=f"{metadata['namespace']}/{metadata['name']}")

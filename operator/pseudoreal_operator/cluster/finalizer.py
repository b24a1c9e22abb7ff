"""The finalizer that kopf puts on every job, and how it is taken off where kopf does not do it."""

import structlog
from pseudoreal_api.base import GROUP

from pseudoreal_operator.cluster.api import Api

FINALIZER = f"{GROUP}/cleanup"

log = structlog.get_logger()


async def release_one(api: Api, metadata: dict[str, object]) -> None:
    finalizers = metadata.get("finalizers")
    if not isinstance(finalizers, list) or FINALIZER not in finalizers:
        return
    namespace, name = str(metadata["namespace"]), str(metadata["name"])
    # With the version, so that a finalizer that somebody adds meanwhile is not lost.
    patch = {
        "resourceVersion": metadata["resourceVersion"],
        "finalizers": [finalizer for finalizer in finalizers if finalizer != FINALIZER],
    }
    await api.merge("PseudoRealJob", namespace, name, {"metadata": patch})
    log.info("released", job=f"{namespace}/{name}")

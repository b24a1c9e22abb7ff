"""`python -m pseudoreal_operator.release`: takes the operator's finalizer off every job.

For a Helm hook: once the operator is gone, deleting a job that has the finalizer would wait for ever.
"""

import asyncio

import structlog

from pseudoreal_operator.api import Api
from pseudoreal_operator.kopf_settings import FINALIZER
from pseudoreal_operator.login import connect
from pseudoreal_operator.logs import configure_logs
from pseudoreal_operator.settings import read_namespaces

log = structlog.get_logger()


async def release(api: Api, namespaces: tuple[str, ...]) -> None:
    for namespace in namespaces or (None,):
        for job in await api.list("PseudoRealJob", namespace):
            await release_one(api, job["metadata"])


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


async def main() -> None:
    async with connect() as api:
        await release(api, read_namespaces())


if __name__ == "__main__":
    configure_logs()
    asyncio.run(main())

"""`python -m pseudoreal_operator.release`: takes the operator's finalizer off every job.

For a Helm hook: once the operator is gone, deleting a job that has the finalizer would wait for ever.
"""

import asyncio

from pseudoreal_operator.cluster.api import Api
from pseudoreal_operator.cluster.finalizer import release_one
from pseudoreal_operator.cluster.login import connect
from pseudoreal_operator.logs import configure_logs
from pseudoreal_operator.settings import read_namespaces


async def release(api: Api, namespaces: tuple[str, ...]) -> None:
    for namespace in namespaces or (None,):
        for job in await api.list("PseudoRealJob", namespace):
            await release_one(api, job["metadata"])


async def main() -> None:
    async with connect() as api:
        await release(api, read_namespaces())


if __name__ == "__main__":
    configure_logs()
    asyncio.run(main())

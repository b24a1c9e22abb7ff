"""Floor of the comparison: a controller of PseudoRealJobs with the fewest possible requests.

For each PseudoRealJob it creates a Service and a Job, and writes two statuses: that the job trains, and that the job
has ended. It reads watches only, and survives no fault. `python -m benchmarks.operator.beside.minimal` is given the
address, the port, and the paths of authority, certificate and key of an API server.
"""

import asyncio
import sys
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pseudoreal_api.names import CONTAINER, LABEL_EXECUTION, LABEL_JOB, LABEL_PHASE, LABEL_STAGE
from pseudoreal_dev.cluster.api import Server
from pseudoreal_dev.cluster.certificates import KeyPair
from pseudoreal_operator import clock

from benchmarks.operator.site import NAMESPACE
from tests.support.load.connection import MERGE, Connection, connect
from tests.support.load.jobs import RESOURCE

Json = dict[str, Any]

_AT_ONCE = 16
_GROUP, _VERSION, _PLURAL = RESOURCE.split("/")
_OURS = f"/apis/{_GROUP}/{_VERSION}/namespaces/{NAMESPACE}/{_PLURAL}"
_JOBS = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
_SERVICES = f"/api/v1/namespaces/{NAMESPACE}/services"


async def _carry(connection: Connection, places: asyncio.Semaphore, job: Json, complete: asyncio.Event) -> None:
    name = job["metadata"]["name"]

    async def request(*arguments: Any) -> None:
        async with places:
            await connection.request(*arguments)

    await request("POST", _SERVICES, _service(name))
    await request("POST", _JOBS, _job(name, job["spec"]["phases"][0]["workers"]))
    await request("PATCH", f"{_OURS}/{name}/status", _status("Training", "Progressing"), MERGE)
    await complete.wait()
    await request("PATCH", f"{_OURS}/{name}/status", _status("Complete", "Complete"), MERGE)


def _service(name: str) -> Json:
    spec = {"clusterIP": "None", "selector": {LABEL_JOB: name}, "publishNotReadyAddresses": True}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def _job(name: str, workers: int) -> Json:
    labels = {LABEL_JOB: name, LABEL_PHASE: "real", LABEL_EXECUTION: "1", LABEL_STAGE: "train"}
    pod = {"restartPolicy": "Never", "subdomain": name, "containers": [{"name": CONTAINER, "image": "trainer"}]}
    template = {"metadata": {"labels": labels}, "spec": pod}
    spec = {"completionMode": "Indexed", "completions": workers, "parallelism": workers, "backoffLimit": 0}
    metadata = {"name": f"{name}-real-e1", "labels": {LABEL_JOB: name}}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec | {"template": template}}


def _status(state: str, condition: str) -> Json:
    now = clock.to_text(datetime.now(UTC))
    found = {"type": condition, "status": "True", "reason": state, "message": state, "lastTransitionTime": now}
    return {"status": {"state": state, "conditions": [found]}}


async def _run(server: Server) -> None:
    complete: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
    places = asyncio.Semaphore(_AT_ONCE)
    async with connect(server) as connection, asyncio.TaskGroup() as tasks:

        async def watch_jobs() -> None:
            while True:
                async for _, job in connection.watch(_JOBS, LABEL_JOB):
                    conditions = (job.get("status") or {}).get("conditions") or []
                    if any(each["type"] == "Complete" and each["status"] == "True" for each in conditions):
                        complete[job["metadata"]["labels"][LABEL_JOB]].set()

        tasks.create_task(watch_jobs())
        known: set[str] = set()
        while True:
            async for _, job in connection.watch(_OURS, ""):
                name = job["metadata"].get("name")
                if name and name not in known:
                    known.add(name)
                    tasks.create_task(_carry(connection, places, job, complete[name]))


if __name__ == "__main__":
    address, port, authority, certificate, key = sys.argv[1:]
    asyncio.run(_run(Server(address, int(port), Path(authority), KeyPair(Path(certificate), Path(key)))))

"""`helm test`: the API server accepts a valid job and rejects an invalid one, and the operator is available.

Usage: python -m pseudoreal_operator.self_test NAMESPACE DEPLOYMENT
"""

import asyncio
import sys
from typing import Any

from kubernetes.aio import client, config
from pseudoreal_api.base import API_VERSION, GROUP, KIND, PLURAL, VERSION


def job(layers: int) -> dict[str, Any]:
    phase = {
        "name": "pseudo",
        "sharing": {"blocks": 2},
        "until": {"step": 1},
        "batch": {"sequences": 1},
    }
    spec = {
        "model": {
            "layers": layers,
            "hiddenSize": 64,
            "attention": {"heads": 4},
            "sequenceLength": 32,
            "feedForward": {"size": 128},
        },
        "data": {"path": "corpus"},
        "phases": [phase],
        "checkpoint": {"storage": {"volume": {"claimName": "checkpoints"}}},
    }
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"generateName": "self-test-"}, "spec": spec}


async def run(namespace: str, deployment: str) -> None:
    """Run the test. Raises RuntimeError with a sentence on the fault."""
    config.load_incluster_config()
    async with client.ApiClient() as api:
        await _dry_run(api, namespace, layers=4)
        try:
            await _dry_run(api, namespace, layers=3)
        except client.ApiException as rejection:
            if "must divide spec.model.layers 3" not in str(rejection.body):
                raise RuntimeError(f"a bad job was refused for another reason: {rejection.body}") from rejection
        else:
            raise RuntimeError("the API server accepted a bad job; is the CustomResourceDefinition up to date?")
        found = await client.AppsV1Api(api).read_namespaced_deployment(deployment, namespace)
        if not (found.status and found.status.available_replicas):
            raise RuntimeError(f"the operator {deployment} is not available; read its log")


async def _dry_run(api: client.ApiClient, namespace: str, layers: int) -> None:
    await client.CustomObjectsApi(api).create_namespaced_custom_object(
        GROUP, VERSION, namespace, PLURAL, job(layers), dry_run="All"
    )


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:3]))
    print("the installation is in order")

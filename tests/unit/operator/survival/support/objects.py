"""Objects that an API server accepts, and that are beyond the operator's bounds."""

import json
from typing import Any

from pseudoreal_api.base import KIND
from pseudoreal_api.names import LABEL_JOB, LABEL_JOB_UID

from tests.support.jobs import good_job
from tests.unit.operator.survival.support.api_server import Stored

EMPTY_MAPS = b"[" + b",".join([b"{}"] * 480_000) + b"]"
"""1.44 MB, which take 36 MB as Python objects."""
DEEP = b'{"f:a":' * 2000 + b"{}" + b"}" * 2000
VARIABLES = b",".join(b'{"name":"v%05d"}' % (number % 100_000) for number in range(140_000))


def job(name: str, namespace: str = "mallory", rest: bytes | None = None, **more: Any) -> Stored:
    spec = b',"spec":' + json.dumps(good_job(name)["spec"]).encode()
    metadata = {"name": name, "namespace": namespace, "uid": f"uid-{name}", "generation": 1}
    return Stored(KIND, metadata, spec if rest is None else rest, **more)


def deep_job(name: str) -> Stored:
    return job(
        name, rest=b',"spec":{"suspend":true,"pod":{"template":{"spec":' + DEEP + b"}}}", managed=b"[" + DEEP + b"]"
    )


def large_job(name: str) -> Stored:
    return job(name, rest=b',"spec":{"suspend":true,"pod":{"template":{"spec":{"x":' + EMPTY_MAPS + b"}}}}")


def child(kind: str, name: str, spec: bytes, owner: str = "honest") -> Stored:
    """Return an object with the operator's labels that is no job's child."""
    labels = {LABEL_JOB: owner, LABEL_JOB_UID: f"uid-{owner}"}
    metadata = {"name": name, "namespace": "mallory", "uid": f"uid-{kind}-{name}", "labels": labels}
    return Stored(kind, metadata, b',"spec":' + spec)

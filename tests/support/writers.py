"""Writers of objects, according to the API server."""

import json
from pathlib import Path
from typing import Any

from tests.support.names import OPERATOR


def writers_of(job: dict[str, Any], *path: str) -> set[str]:
    """Return the field managers of a field."""
    return {entry["manager"] for entry in job["metadata"]["managedFields"] if _has(entry["fieldsV1"], path)}


def _has(fields: dict[str, Any], path: tuple[str, ...]) -> bool:
    for key in path:
        if f"f:{key}" not in fields:
            return False
        fields = fields[f"f:{key}"]
    return True


def verbs_on_jobs(audit_log: Path, namespace: str) -> set[str]:
    """Return the verbs of the operator's requests on the namespace's Jobs."""
    found = verbs_on("jobs", audit_log, namespace)
    assert "create" in found, "the log has all requests of the operator, which creates Jobs"
    return found


def verbs_on(resource: str, audit_log: Path, namespace: str) -> set[str]:
    """Return the verbs of the operator's requests on a resource in the namespace, such as pseudorealjobs, including its
    status."""
    found = set()
    for line in audit_log.read_text().splitlines():
        entry = json.loads(line)
        of = entry.get("objectRef", {})
        if entry["user"]["username"] == OPERATOR and (of.get("resource"), of.get("namespace")) == (resource, namespace):
            found.add(entry["verb"])
    return found

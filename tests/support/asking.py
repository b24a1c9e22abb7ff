"""Requests to the API server as any user, answered within milliseconds."""

import json
from dataclasses import dataclass
from typing import Any

from kubernetes import client

Json = dict[str, Any]


@dataclass(frozen=True)
class Asking:
    """A user with all rights: only admission can refuse a request."""

    api: client.ApiClient
    user: str = ""

    def create(self, path: str, body: Json, *, dry_run: bool = True) -> str:
        return self._ask("POST", path, body, dry_run)

    def merge(self, path: str, patch: Json, *, dry_run: bool = True) -> str:
        return self._ask("PATCH", path, patch, dry_run)

    def delete(self, path: str, *, dry_run: bool = True) -> str:
        return self._ask("DELETE", path, {"gracePeriodSeconds": 0}, dry_run)

    def _ask(self, method: str, path: str, body: Json, dry_run: bool) -> str:
        """Return the API server's refusal as a sentence; empty if it accepts. `path` is below the root."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Accept": "application/json", "Content-Type": kind}
        headers |= {"Impersonate-User": self.user, "Impersonate-Group": "system:masters"} if self.user else {}
        query = [("dryRun", "All")] if dry_run else []
        sent = self.api.param_serialize(
            method, f"/{path}", query_params=query, header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        answer = self.api.call_api(*sent)
        said: Json = json.loads(answer.read())
        return "" if 200 <= answer.status <= 299 else str(said["message"])

"""kubectl and helm for one named cluster, independent of the current context."""

import json
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pseudoreal_dev.machine import shell

POLL_SECONDS = 1.0
REQUEST_SECONDS = 10


@dataclass(frozen=True)
class Kubernetes:
    """Command prefixes of kubectl and helm for one cluster."""

    kubectl: tuple[str, ...]
    helm: tuple[str, ...]

    @classmethod
    def of_kubeconfig(cls, kubeconfig: Path, kubectl: Path, helm: Path) -> "Kubernetes":
        option = f"--kubeconfig={kubeconfig}"
        return cls((str(kubectl), option), (str(helm), option))

    @classmethod
    def of_context(cls, context: str) -> "Kubernetes":
        return cls(("kubectl", f"--context={context}"), ("helm", f"--kube-context={context}"))

    def run(self, *arguments: str) -> str:
        """Return the output of `kubectl arguments`. Raises CommandFailed."""
        return shell.output([*self.kubectl, *arguments])

    def require_answer(self, seconds: int) -> None:
        """Wait until the API server is ready. Raises CommandFailed if it is not within `seconds`."""
        deadline = time.monotonic() + seconds
        asks = [*self.kubectl, "get", "--raw=/readyz", f"--request-timeout={REQUEST_SECONDS}s"]
        while True:
            try:
                # The second limit is for a program that kubectl asks for credentials.
                shell.output(asks, seconds=2 * REQUEST_SECONDS)
                return
            except shell.CommandFailed:
                if time.monotonic() > deadline:
                    raise
            time.sleep(POLL_SECONDS)

    def find(self, *arguments: str) -> dict[str, Any] | None:
        """Return the object named by `kubectl get arguments`; None if it does not exist."""
        text = self.run("get", *arguments, "--ignore-not-found", "--output=json")
        return json.loads(text) if text.strip() else None

    def items(self, *arguments: str) -> list[dict[str, Any]]:
        """Return the objects listed by `kubectl get arguments`."""
        listed: list[dict[str, Any]] = json.loads(self.run("get", *arguments, "--output=json"))["items"]
        return listed

    def apply(self, manifest: Mapping[str, Any]) -> None:
        """Apply one object. Raises CommandFailed with the server's answer."""
        self._apply("-", json.dumps(manifest))

    def apply_file(self, path: Path) -> None:
        """Apply a file of objects. Raises CommandFailed with the server's answer."""
        self._apply(str(path), None)

    def run_helm(self, *arguments: str) -> str:
        """Return the output of `helm arguments`. Raises CommandFailed."""
        return shell.output([*self.helm, *arguments])

    def _apply(self, file: str, text: str | None) -> None:
        command = [
            *self.kubectl,
            "apply",
            "--server-side",
            "--field-manager=pseudoreal-demo",
            "--force-conflicts",
            "-f",
        ]
        done = subprocess.run([*command, file], input=text, capture_output=True, text=True, env=os.environ)
        if done.returncode != 0:
            raise shell.CommandFailed(f"kubectl apply failed: {done.stderr.strip()}")

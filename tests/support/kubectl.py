"""kubectl for the API server of a test."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pseudoreal_dev.cluster import binaries


@dataclass(frozen=True)
class Kubectl:
    kubeconfig: Path

    def __call__(self, *words: str, body: Any = None, text: str | None = None) -> "subprocess.CompletedProcess[str]":
        """Run kubectl and return the result, whether it succeeds or not. `body`, or `text`, is its input for `-f -`."""
        command = [str(binaries.build("kubectl").path("kubectl")), f"--kubeconfig={self.kubeconfig}", *words]
        text = text if body is None else json.dumps(body)
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)

    def said(self, *words: str, body: Any = None) -> str:
        """Run kubectl and return its output; the test fails if kubectl does."""
        done = self(*words, body=body)
        assert done.returncode == 0, done.stderr
        return done.stdout

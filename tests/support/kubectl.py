"""kubectl on an API server, for tests of what it shows and of what it is told."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pseudoreal_dev.cluster import binaries


@dataclass(frozen=True)
class Kubectl:
    kubeconfig: Path

    def __call__(self, *words: str, body: Any = None) -> "subprocess.CompletedProcess[str]":
        """`body` is what it reads with `-f -`. Whether it succeeds is up to the test."""
        command = [str(binaries.build().path("kubectl")), f"--kubeconfig={self.kubeconfig}", *words]
        text = None if body is None else json.dumps(body)
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)

    def said(self, *words: str, body: Any = None) -> str:
        """What it prints; the test fails if it does not succeed."""
        done = self(*words, body=body)
        assert done.returncode == 0, done.stderr
        return done.stdout

"""A job on the cluster from a test's point of view: status, pods, events, and files on its volume."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pseudoreal_api.names import LABEL_EXECUTION, LABEL_JOB, LABEL_STAGE, work_directory
from pseudoreal_api.status.status import Condition, PseudoRealJobStatus
from pseudoreal_dev.cluster.kubectl import Kubernetes
from pseudoreal_dev.demo.follow import read_status

from tests.e2e.support import machine
from tests.e2e.support.operator_log import Watch
from tests.support import patience
from tests.support.jobs import good_job

T = TypeVar("T")
Json = dict[str, Any]
NAMESPACE = "default"
CLAIM = "faults"
IN_NAMESPACE = f"--namespace={NAMESPACE}"
PATIENCE_SECONDS = 900.0
"""Limit in seconds; a job takes one or two minutes on a quiet machine."""


@dataclass(frozen=True)
class Job:
    kubernetes: Kubernetes
    name: str
    claim: str = CLAIM

    @property
    def body(self) -> Json:
        found = self.kubernetes.find("prj", self.name, IN_NAMESPACE)
        assert found, f"job {self.name} exists"
        return found

    def status(self) -> PseudoRealJobStatus:
        return read_status(self.kubernetes.find("prj", self.name, IN_NAMESPACE))

    def condition(self, kind: str) -> Condition:
        return next(condition for condition in self.status().conditions if condition.type == kind)

    def pods(self, role: str = "") -> list[Json]:
        of_role = f",{LABEL_STAGE}={role}" if role else ""
        return self.kubernetes.items("pods", IN_NAMESPACE, f"--selector={LABEL_JOB}={self.name}{of_role}")

    def running(self, role: str = "train") -> list[Json]:
        """Return the pods with a running container, sorted by name."""
        pods = [pod for pod in self.pods(role) if pod["status"]["phase"] == "Running"]
        return sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))

    def alive(self, role: str = "") -> list[Json]:
        """Return the pods still pending or running."""
        return [pod for pod in self.pods(role) if pod["status"]["phase"] in ("Pending", "Running")]

    def events(self) -> list[Json]:
        """Return the job's events in the order of their posting."""
        uid = self.body["metadata"]["uid"]
        events = [e for e in self.kubernetes.items("events", IN_NAMESPACE) if e["involvedObject"].get("uid") == uid]
        return sorted(events, key=lambda event: str(event["metadata"]["name"]))

    def reasons(self) -> list[str]:
        return [event["reason"] for event in self.events()]

    def told(self, reason: str) -> str:
        """Return the message of the only event with this reason."""
        patience.wait_for(reason, lambda: reason in self.reasons(), self.reasons)
        (event,) = [event for event in self.events() if event["reason"] == reason]
        return str(event["message"])

    def suspend(self, wish: bool) -> None:
        patch = json.dumps({"spec": {"suspend": wish}})
        self.kubernetes.run("patch", "prj", self.name, IN_NAMESPACE, "--type=merge", f"--patch={patch}")

    @property
    def folder(self) -> Path:
        """The job's work directory, as a path on this machine."""
        return machine.volume(self.claim) / work_directory("", self.name, self.body["metadata"]["uid"]).lstrip("/")

    def steps(self) -> int:
        """Return the highest step in the job's metrics."""
        try:
            lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return 0
        return max((json.loads(line).get("step", 0) for line in lines), default=0)

    def steps_in_order(self) -> list[int]:
        """Return the steps in the order of the metrics' lines."""
        return [json.loads(line)["step"] for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def manifests(self) -> list[Json]:
        """Return the manifests of all committed checkpoints, sorted by step."""
        found = [json.loads(path.read_text()) for path in self.folder.glob("checkpoints/*/manifest.json")]
        return sorted(found, key=lambda manifest: int(manifest["step"]))

    def checkpoints(self, phase: str) -> list[Path]:
        """Return the folders of the committed checkpoints of a phase."""
        return sorted(path.parent for path in self.folder.glob(f"checkpoints/{phase}-*/manifest.json"))

    def final_files(self) -> dict[str, str]:
        """Return the SHA-256 of each file of the last checkpoint: weights and moments of all ranks."""
        last = self.status().phases[-1].end_checkpoint
        manifest = json.loads((self.folder / "checkpoints" / str(last) / "manifest.json").read_text())
        return {name: file["sha256"] for name, file in manifest["files"].items()}

    def wait(self, what: str, condition: Callable[[PseudoRealJobStatus], bool]) -> PseudoRealJobStatus:
        def reached() -> PseudoRealJobStatus | None:
            status = self.status()
            return status if condition(status) else None

        return self.wait_for(what, reached)

    def wait_for(self, what: str, probe: Callable[[], T | None]) -> T:
        """Wait for `probe`; fail early if the operator keeps repeating an error."""
        watch = Watch(self.kubernetes)

        def watched() -> T | None:
            watch.look()
            return probe()

        return wait_for(what, watched, self.status)

    def wait_for_steps(self, phase: str, steps: int) -> list[Json]:
        """Wait until `phase` has trained `steps` steps; return its running pods."""

        def reached() -> list[Json] | None:
            return self.running() if self.steps() >= steps and self.status().current_phase == phase else None

        return self.wait_for(f"{steps} steps of {self.name}", reached)

    def wait_for_execution(self, number: int) -> list[Json]:
        """Wait until all pods of the execution are created, and return them."""

        def made() -> list[Json] | None:
            pods = [pod for pod in self.pods() if pod["metadata"]["labels"][LABEL_EXECUTION] == str(number)]
            return pods if len(pods) == self.status().replicas.desired else None

        return self.wait_for(f"the pods of execution {number}", made)

    def wait_for_end(self) -> PseudoRealJobStatus:
        return self.wait("the end", lambda status: status.state in ("Complete", "Failed"))


@contextmanager
def applied(kubernetes: Kubernetes, name: str, claim: str = CLAIM, **changes: Any) -> Iterator[Job]:
    """Apply a small job on the quickstart's text; it is deleted at the end."""
    changes = {"spec__data__path": "corpus/kjv", "spec__checkpoint__storage__volume__claimName": claim, **changes}
    job = Job(kubernetes, name, claim)
    try:
        kubernetes.apply(good_job(name, **changes))
        yield job
    finally:
        kubernetes.run("delete", "prj", name, IN_NAMESPACE, "--ignore-not-found", "--timeout=10m")


def wait_for(what: str, probe: Callable[[], T | None], explain: Callable[[], object] = str) -> T:
    """Poll once a second: most probes here start a process."""
    return patience.wait_for(what, probe, explain, PATIENCE_SECONDS, pause=1.0)

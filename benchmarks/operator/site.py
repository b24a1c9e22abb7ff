"""Site of the measurement: an API server with an audit log, a namespace, and operators in sequence."""

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pseudoreal_dev.cluster.certificates import Authority
from pseudoreal_dev.cluster.control_plane import ControlPlane

from tests.support.cluster import Cluster
from tests.support.installed import install, make_namespace
from tests.support.load.audit import AuditLog
from tests.support.load.usage import Usage, usage
from tests.support.names import OPERATOR
from tests.support.operator_process import Operator

NAMESPACE = "load"
_LOG_MEGABYTES = 100_000


@dataclass
class Site:
    control_plane: ControlPlane
    cluster: Cluster
    kubeconfig: Path
    tls: Path
    audit: AuditLog
    operators: list[Operator] = field(default_factory=list)

    def start_operator(self) -> Operator:
        number = len(self.operators)
        log = self.control_plane.directory / f"operator-{number}.log"
        self.operators.append(
            Operator(self.kubeconfig, NAMESPACE, log, self.tls, f"operator-{number}", is_program=True)
        )
        self.operators[-1].start()
        return self.operators[-1]

    def complaints(self) -> dict[str, int]:
        """Return how often the operators logged each warning or error."""
        texts = [operator.log.read_text().splitlines() for operator in self.operators]
        said = [json.loads(line) for text in texts for line in text if line.startswith("{") and line.endswith("}")]
        return dict(Counter(line["event"] for line in said if line.get("level") in ("warning", "error", "critical")))

    def servers_seconds(self) -> float:
        """Return the processor seconds of etcd, the API server and the controller manager."""
        return sum(usage(process.pid).seconds for process in self.control_plane.processes)

    def transitions(self) -> int:
        """Return how often the Lease changed its holder."""
        (lease,) = self.cluster.list("apis/coordination.k8s.io/v1 leases")
        return int(lease["spec"].get("leaseTransitions", 0))


def usage_of(operator: Operator) -> Usage:
    assert operator.process is not None, "start_operator has set the process"
    return usage(operator.process.pid)


@contextmanager
def site(audit_policy: dict[str, Any]) -> Iterator[Site]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "audit.yaml").write_text(json.dumps(audit_policy))
        arguments = [f"--audit-policy-file={folder / 'audit.yaml'}", f"--audit-log-path={folder / 'audit.log'}"]
        arguments += [f"--audit-log-maxsize={_LOG_MEGABYTES}"]
        with ControlPlane(folder, api_server_arguments=arguments) as running:
            authority = Authority(folder / "tls")
            authority.issue("tls", hosts=["127.0.0.1"])
            cluster = make_namespace(install(running), NAMESPACE)
            kubeconfig = running.user(OPERATOR)[1]
            found = Site(running, cluster, kubeconfig, authority.folder, AuditLog(folder / "audit.log"))
            try:
                yield found
            finally:
                for operator in found.operators:
                    if operator.is_running:
                        operator.kill()

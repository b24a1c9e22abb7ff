"""CoreDNS on the first node, as a process and not as a pod. Resolves the cluster's names and no others."""

import http.client
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_dev.cluster import node_files
from pseudoreal_dev.cluster.api import wait_until
from pseudoreal_dev.cluster.binaries import Binaries
from pseudoreal_dev.cluster.control_plane import ControlPlane
from pseudoreal_dev.cluster.network import FIRST
from pseudoreal_dev.machine import processes, shell
from pseudoreal_dev.machine.processes import Process

SERVICE = Path(__file__).with_name("dns.yaml")


@dataclass(frozen=True)
class Dns:
    """The cluster's name server, with its files in `directory`."""

    directory: Path
    control: ControlPlane

    def start(self, binaries: Binaries) -> None:
        """Start CoreDNS and wait until names can be resolved. Raises DevError on a timeout, or if CoreDNS ends."""
        self.directory.mkdir(parents=True, exist_ok=True)
        shell.output([binaries.path("kubectl"), "--kubeconfig", self.control.kubeconfig, "apply", "-f", SERVICE])
        command = [*FIRST.inside, str(binaries.path("coredns")), "-conf", str(self._configuration())]
        log = self.directory.parent / "logs" / "coredns.log"
        process = processes.launch("coredns", command, records=self._records, log=log)
        wait_until(self.answers, "CoreDNS is ready", [process])

    def stop(self) -> None:
        processes.stop(self.processes, self._records)

    @property
    def processes(self) -> list[Process]:
        """Started processes, whether still running or not."""
        return processes.recorded(self._records)

    def answers(self) -> bool:
        """Return whether CoreDNS has read the cluster's Services."""
        connection = http.client.HTTPConnection(FIRST.address, node_files.DNS_READY_PORT, timeout=5)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _configuration(self) -> Path:
        _, kubeconfig = self.control.user("system:coredns")
        path = self.directory / "Corefile"
        path.write_text(node_files.corefile(kubeconfig, self.control.site.context))
        return path

    @property
    def _records(self) -> Path:
        return self.directory / "processes"

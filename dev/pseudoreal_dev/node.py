"""The cluster's one node: kubelet and kube-proxy beside containerd, and CoreDNS on the node itself."""

import http.client
import json
from collections.abc import Sequence
from pathlib import Path

from . import cgroups, network, node_files, processes, shell
from .api import wait_until
from .binaries import Binaries
from .containerd import Containerd
from .control_plane import ControlPlane
from .node_files import NODE_NAME
from .processes import Process

START_SECONDS = 60.0
DNS = Path(__file__).with_name("dns.yaml")


class Node:
    """A node whose files lie in `directory`; its programs run in the cluster's network namespace."""

    def __init__(self, directory: Path, control: ControlPlane, containerd: Containerd) -> None:
        self.directory = directory
        self._control = control
        self._containerd = containerd
        self._records = directory / "processes"

    def start(self, binaries: Binaries) -> None:
        """Starts the node's programs, containerd being there already, and waits until pods can run and find names."""
        self.directory.mkdir(parents=True, exist_ok=True)
        cgroups.create()
        kubelet = self._launch("kubelet", binaries, self._kubelet())
        proxy = self._launch("kube-proxy", binaries, self._kube_proxy())
        shell.output([binaries.path("kubectl"), "--kubeconfig", self._control.kubeconfig, "apply", "-f", DNS])
        dns = self._launch("coredns", binaries, self._coredns())
        wait_until(self.names_resolve, "CoreDNS is ready", START_SECONDS, [dns, proxy])
        wait_until(self.is_ready, "the node is ready", START_SECONDS, [kubelet, proxy])

    def stop(self) -> None:
        """Ends the node's programs; its pods run on."""
        processes.stop(self.processes, self._records)

    @property
    def processes(self) -> list[Process]:
        """What was started, running or not."""
        return processes.recorded(self._records)

    def is_ready(self) -> bool:
        """Whether the API server calls the node ready."""
        answer = self._control.server.get(f"/api/v1/nodes/{NODE_NAME}")
        conditions = json.loads(answer)["status"].get("conditions", []) if answer else []
        return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)

    def names_resolve(self) -> bool:
        """Whether CoreDNS has read the cluster's Services."""
        connection = http.client.HTTPConnection(network.NODE_ADDRESS, node_files.DNS_READY_PORT, timeout=5)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _kubelet(self) -> list[str]:
        serving, kubeconfig = self._control.user(
            f"system:node:{NODE_NAME}", ["system:nodes"], [network.NODE_ADDRESS, NODE_NAME]
        )
        self._write("resolv.conf", "# There is no name server outside the cluster.\n")
        authority = self._control.server.authority
        text = node_files.kubelet(self.directory, self._containerd.socket, authority, serving, cgroups.NAME)
        self._containerd.network_configuration.mkdir(parents=True, exist_ok=True)
        (self._containerd.network_configuration / "pseudoreal.conflist").write_text(
            node_files.pod_network(self.directory)
        )
        return [
            f"--hostname-override={NODE_NAME}",
            f"--node-ip={network.NODE_ADDRESS}",
            f"--kubeconfig={kubeconfig}",
            f"--root-dir={self.directory / 'kubelet'}",
            f"--config={self._write('kubelet.yaml', text)}",
        ]

    def _kube_proxy(self) -> list[str]:
        _, kubeconfig = self._control.user("system:kube-proxy")
        return [f"--config={self._write('kube-proxy.yaml', node_files.kube_proxy(kubeconfig))}"]

    def _coredns(self) -> list[str]:
        _, kubeconfig = self._control.user("system:coredns")
        text = node_files.corefile(kubeconfig, self._control.site.context)
        return ["-conf", str(self._write("Corefile", text))]

    def _launch(self, name: str, binaries: Binaries, arguments: Sequence[str]) -> Process:
        command = [*network.INSIDE, str(binaries.path(name)), *arguments]
        log = self.directory.parent / "logs" / f"{name}.log"
        return processes.launch(name, command, records=self._records, log=log)

    def _write(self, name: str, text: str) -> Path:
        path = self.directory / name
        path.write_text(text)
        return path

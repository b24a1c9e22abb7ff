"""A node of the cluster: kubelet and kube-proxy beside containerd."""

import json
from collections.abc import Sequence
from pathlib import Path

from pseudoreal_dev.cluster import node_files
from pseudoreal_dev.cluster.api import wait_until
from pseudoreal_dev.cluster.binaries import Binaries
from pseudoreal_dev.cluster.containerd import Containerd
from pseudoreal_dev.cluster.control_plane import ControlPlane
from pseudoreal_dev.cluster.network import Host
from pseudoreal_dev.machine import cgroups, processes
from pseudoreal_dev.machine.processes import Process


class Node:
    """Node with its files in `directory` and its pods in `cgroup`."""

    def __init__(
        self, directory: Path, host: Host, control: ControlPlane, containerd: Containerd, cgroup: str = cgroups.NAME
    ) -> None:
        self.directory = directory
        self.host = host
        self._control = control
        self._containerd = containerd
        self._cgroup = cgroup
        self._records = directory / "processes"

    def start(self, binaries: Binaries) -> None:
        """Start the node's programs and wait until pods can run. containerd must be running."""
        self.directory.mkdir(parents=True, exist_ok=True)
        cgroups.create(self._cgroup)
        kubelet = self._launch("kubelet", binaries, self._kubelet())
        proxy = self._launch("kube-proxy", binaries, self._kube_proxy())
        wait_until(self.is_ready, "the node is ready", [kubelet, proxy])

    def stop(self) -> None:
        """Stop the node's programs; its pods keep running."""
        processes.stop(self.processes, self._records)

    @property
    def processes(self) -> list[Process]:
        """Started processes, whether still running or not."""
        return processes.recorded(self._records)

    def is_ready(self) -> bool:
        """Return whether the API server reports the node as ready."""
        answer = self._control.server.get(f"/api/v1/nodes/{self.host.node}")
        conditions = json.loads(answer)["status"].get("conditions", []) if answer else []
        return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)

    def _kubelet(self) -> list[str]:
        serving, kubeconfig = self._control.user(
            f"system:node:{self.host.node}", ["system:nodes"], [self.host.address, self.host.node]
        )
        self._write("resolv.conf", "# There is no name server outside the cluster.\n")
        authority = self._control.server.authority
        text = node_files.kubelet(self.directory, self._containerd.socket, authority, serving, self._cgroup)
        self._containerd.network_configuration.mkdir(parents=True, exist_ok=True)
        (self._containerd.network_configuration / "pseudoreal.conflist").write_text(
            node_files.pod_network(self.host, self.directory)
        )
        return [
            f"--hostname-override={self.host.node}",
            f"--node-ip={self.host.address}",
            f"--kubeconfig={kubeconfig}",
            f"--root-dir={self.directory / 'kubelet'}",
            f"--config={self._write('kubelet.yaml', text)}",
        ]

    def _kube_proxy(self) -> list[str]:
        _, kubeconfig = self._control.user("system:kube-proxy")
        return [f"--config={self._write('kube-proxy.yaml', node_files.kube_proxy(self.host, kubeconfig))}"]

    def _launch(self, name: str, binaries: Binaries, arguments: Sequence[str]) -> Process:
        command = [*self.host.inside, str(binaries.path(name)), *arguments]
        log = self.directory.parent / "logs" / f"{self.directory.name}-{name}.log"
        return processes.launch(name, command, records=self._records, log=log)

    def _write(self, name: str, text: str) -> Path:
        path = self.directory / name
        path.write_text(text)
        return path

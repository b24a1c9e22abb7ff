"""etcd, API server, controller manager and scheduler: either alone on loopback for tests, or as part of the cluster."""

import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from pseudoreal_dev.cluster.api import Server, wait_until
from pseudoreal_dev.cluster.binaries import Binaries, build
from pseudoreal_dev.cluster.certificates import Authority, KeyPair, write_signing_key
from pseudoreal_dev.cluster.network import POD_NETWORK, SERVICE_NETWORK
from pseudoreal_dev.machine import processes
from pseudoreal_dev.machine.processes import Process

FIRST_SERVICE = "10.96.0.1"
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager")
"""Programs of a control plane without nodes."""


@dataclass(frozen=True)
class Site:
    """Location of a control plane: addresses and ports of its servers, and the words before each command (`prefix`)."""

    address: str
    bind: str
    api_port: int
    etcd_port: int
    etcd_peer_port: int
    prefix: tuple[str, ...]
    context: str
    has_nodes: bool


class ControlPlane:
    """Control plane with its files in `directory`. As a context manager, starts and stops the control plane.

    Without a `site`, the control plane runs on loopback with free ports, and has no nodes and no scheduler: pods are
    created and stay pending. The processes then end together with this program, even if this program is killed.
    `api_server_arguments` are passed to kube-apiserver unchanged. `kubernetes` is the minor version of the API server
    and the controllers, if the other programs have another one.
    """

    def __init__(
        self,
        directory: Path,
        *,
        site: Site | None = None,
        api_server_arguments: Sequence[str] = (),
        kubernetes: str | None = None,
    ) -> None:
        self.directory = directory
        self.site = site or loopback_site()
        self._arguments = tuple(api_server_arguments)
        self._kubernetes = kubernetes
        self._records = directory / "processes"
        self.kubeconfig = directory / "kubeconfig"

    def __enter__(self) -> Self:
        try:
            self.start(build(*PROGRAMS, kubernetes=self._kubernetes))
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, binaries: Binaries) -> None:
        """Start all programs on an empty etcd, and wait until pods can be created. Raises DevError if a program ends or
        the wait takes too long."""
        shutil.rmtree(self.directory / "etcd", ignore_errors=True)
        self._issue()
        self._launch("etcd", binaries, self._etcd())
        self.start_api_server(binaries)
        manager = self._launch("kube-controller-manager", binaries, self._controller_manager())
        if self.site.has_nodes:
            self._launch("kube-scheduler", binaries, self._scheduler())
        # Without its service account, the default namespace refuses pods.
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        wait_until(lambda: self.server.finds(account), "the default service account is there", [manager])

    def stop(self) -> None:
        """Kill the processes of this control plane. No data is worth saving: a later start has an empty etcd."""
        processes.end(self.processes, self._records)

    def start_api_server(self, binaries: Binaries) -> None:
        """Start the API server on the present content of etcd, and wait until the API server is ready. Raises DevError
        on a timeout, or if a program ends."""
        self._launch("kube-apiserver", binaries, self._api_server())
        wait_until(lambda: self.server.finds("/readyz"), "the API server is ready", self.processes)

    def kill_api_server(self) -> None:
        """Kill the API server alone, in the middle of its work."""
        processes.end([process for process in self.processes if process.name == "kube-apiserver"], self._records)

    def user(self, name: str, groups: Sequence[str] = (), hosts: Sequence[str] = ()) -> tuple[KeyPair, Path]:
        """Create a certificate for a client, and a kubeconfig with it."""
        authority = self._authority
        pair = authority.issue(name, groups, hosts)
        path = authority.folder / f"{pair.key.stem}.kubeconfig"
        return pair, authority.kubeconfig(path, self.server.url, self.site.context, pair)

    @property
    def server(self) -> Server:
        """The API server, with the administrator's certificate."""
        admin = KeyPair(self._pki("admin.crt"), self._pki("admin.key"))
        return Server(self.site.address, self.site.api_port, self._pki("ca.crt"), admin)

    @property
    def processes(self) -> list[Process]:
        """Started processes, whether still running or not."""
        return processes.recorded(self._records)

    @property
    def _authority(self) -> Authority:
        return Authority(self.directory / "pki")

    def _issue(self) -> None:
        authority = self._authority
        hosts = [self.site.address, "127.0.0.1", FIRST_SERVICE, "localhost", "kubernetes.default.svc"]
        authority.issue("kube-apiserver", hosts=hosts)
        # The API server's own client certificate, for requests to the kubelet.
        authority.issue("kubelet-client", ["system:masters"])
        write_signing_key(self._pki("accounts.key"))
        for component in ("kube-controller-manager", "kube-scheduler"):
            self.user(f"system:{component}")
        admin = authority.issue("admin", ["system:masters"])
        authority.kubeconfig(self.kubeconfig, self.server.url, self.site.context, admin)

    def _launch(self, name: str, binaries: Binaries, arguments: Sequence[str]) -> Process:
        command = [*self.site.prefix, str(binaries.path(name)), *arguments]
        return processes.launch(name, command, records=self._records, log=self.directory / "logs" / f"{name}.log")

    def _etcd(self) -> list[str]:
        client = f"http://127.0.0.1:{self.site.etcd_port}"
        peer = f"http://127.0.0.1:{self.site.etcd_peer_port}"
        return [
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",  # safe: each start begins with an empty etcd
            f"--data-dir={self.directory / 'etcd'}",
        ]

    def _api_server(self) -> list[str]:
        return [
            f"--etcd-servers=http://127.0.0.1:{self.site.etcd_port}",
            f"--bind-address={self.site.bind}",
            f"--secure-port={self.site.api_port}",
            f"--advertise-address={self.site.address}",
            f"--service-cluster-ip-range={SERVICE_NETWORK}",
            "--authorization-mode=Node,RBAC",
            "--allow-privileged=true",
            f"--client-ca-file={self._pki('ca.crt')}",
            f"--tls-cert-file={self._pki('kube-apiserver.crt')}",
            f"--tls-private-key-file={self._pki('kube-apiserver.key')}",
            f"--kubelet-client-certificate={self._pki('kubelet-client.crt')}",
            f"--kubelet-client-key={self._pki('kubelet-client.key')}",
            # The node's name is not in any DNS.
            "--kubelet-preferred-address-types=InternalIP",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={self._pki('accounts.key')}",
            f"--service-account-signing-key-file={self._pki('accounts.key')}",
            # Without nodes nothing uses the Service `kubernetes`, and it may not lead to an address of loopback.
            *([] if self.site.has_nodes else ["--endpoint-reconciler-type=none"]),
            *self._arguments,
            f"--cert-dir={self.directory}",
        ]

    def _controller_manager(self) -> list[str]:
        return [
            *self._client("kube-controller-manager"),
            "--use-service-account-credentials=true",
            f"--root-ca-file={self._pki('ca.crt')}",
            f"--service-account-private-key-file={self._pki('accounts.key')}",
            f"--cluster-signing-cert-file={self._pki('ca.crt')}",
            f"--cluster-signing-key-file={self._pki('ca.key')}",
            # With the default of 20 requests per second, the controllers alone take 4 s to start.
            "--kube-api-qps=500",
            "--kube-api-burst=500",
            f"--cluster-cidr={POD_NETWORK}",
            "--allocate-node-cidrs=true",
            *([] if self.site.has_nodes else _WITHOUT_NODES),
            f"--cert-dir={self.directory}",
        ]

    def _scheduler(self) -> list[str]:
        return self._client("kube-scheduler")

    def _client(self, name: str) -> list[str]:
        kubeconfig = self._pki(f"system-{name}.kubeconfig")
        # One replica of each program needs no leader election, and their metrics are not scraped.
        return ["--leader-elect=false", "--secure-port=0", f"--kubeconfig={kubeconfig}"]

    def _pki(self, name: str) -> Path:
        return self.directory / "pki" / name


_WITHOUT_NODES = (
    # Nodes created by tests have no kubelet that would renew their heartbeat.
    "--node-monitor-grace-period=24h",
    # Tests bind pods to nodes that do not exist, and this controller deletes such pods within a minute.
    "--controllers=*,-pod-garbage-collector-controller",
)


def loopback_site() -> Site:
    """Return a site with free ports on loopback. The kernel kills the site's processes when this program ends."""
    api_port, etcd_port, etcd_peer_port = _free_ports(3)
    return Site(
        address="127.0.0.1",
        bind="127.0.0.1",
        api_port=api_port,
        etcd_port=etcd_port,
        etcd_peer_port=etcd_peer_port,
        prefix=("setpriv", "--pdeathsig", "KILL"),
        context="pseudoreal-test",
        has_nodes=False,
    )


def _free_ports(count: int) -> list[int]:
    # All sockets stay open until the last port is chosen, so that no port is chosen twice.
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [opened.getsockname()[1] for opened in sockets]
    for opened in sockets:
        opened.close()
    return ports

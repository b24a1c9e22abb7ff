"""Network namespaces of the cluster's nodes. No packet leaves the machine.

The first node's namespace is connected to the machine. The second node's namespace is connected to the first one, and
the first node forwards its packets.
"""

from dataclasses import dataclass
from pathlib import Path

from pseudoreal_dev.machine import shell

HOST_DEVICE = "pseudoreal0"
HOST_ADDRESS = "198.18.0.1"
SECOND_DEVICE = "second"
SECOND_GATEWAY = "198.18.0.5"
LINKS = "198.18.0.0/29"
POD_NETWORK = "10.244.0.0/16"
SERVICE_NETWORK = "10.96.0.0/16"
CHAIN = "PSEUDOREAL"


@dataclass(frozen=True)
class Host:
    """Network identity of a node. `pods`: subnet of the node's pods."""

    node: str
    namespace: str
    address: str
    pods: str

    @property
    def inside(self) -> tuple[str, ...]:
        """Command prefix for entering the namespace. `ip netns exec` is unsuitable: it remounts /sys without the
        cgroups."""
        return ("nsenter", f"--net={self.handle}")

    @property
    def handle(self) -> Path:
        return Path("/run/netns") / self.namespace

    @property
    def exists(self) -> bool:
        """Whether the handle of the namespace exists; after a crash, the handle can be a file without a namespace."""
        return self.handle.exists()


FIRST = Host("pseudoreal-node", "pseudoreal", "198.18.0.2", "10.244.0.0/24")
SECOND = Host("pseudoreal-second", "pseudoreal-second", "198.18.0.6", "10.244.1.0/24")


def create() -> None:
    """Create the first node's namespace, and a veth pair connecting it to this machine."""
    _add(FIRST)
    shell.output(["ip", "link", "add", HOST_DEVICE, "type", "veth", *_peer(FIRST)])
    shell.output(["ip", "address", "add", f"{HOST_ADDRESS}/30", "dev", HOST_DEVICE])
    shell.output(["ip", "link", "set", HOST_DEVICE, "up"])
    _bring_up(FIRST)
    # This route leads nowhere, but the kubelet, the API server and kube-proxy choose their address by the default
    # route.
    _ip(FIRST, "route", "add", "default", "dev", "eth0")
    # Packets to the address of a deleted pod are rejected at once.
    _ip(FIRST, "route", "add", "unreachable", POD_NETWORK)
    _close()


def create_second() -> None:
    """Create the second node's namespace, and connect it to the first one."""
    _add(SECOND)
    _ip(FIRST, "link", "add", SECOND_DEVICE, "type", "veth", *_peer(SECOND))
    _ip(FIRST, "address", "add", f"{SECOND_GATEWAY}/30", "dev", SECOND_DEVICE)
    _bring_up(SECOND)
    join_second()
    _ip(SECOND, "route", "add", "default", "via", SECOND_GATEWAY)
    _ip(SECOND, "route", "add", "unreachable", SECOND.pods)


def join_second() -> None:
    """Connect the second node."""
    _ip(FIRST, "link", "set", SECOND_DEVICE, "up")
    _ip(FIRST, "route", "add", SECOND.pods, "via", SECOND.address)


def cut_second() -> None:
    """Disconnect the second node: its programs keep running, unreachable for all others."""
    _ip(FIRST, "link", "set", SECOND_DEVICE, "down")


def delete_second() -> None:
    """Remove the second node's namespace and its veth pair, as far as they exist."""
    _delete(SECOND)
    shell.succeeds(["ip", "-n", FIRST.namespace, "link", "delete", SECOND_DEVICE])


def delete() -> None:
    """Remove the first node's namespace and its veth pair, as far as they exist."""
    _delete(FIRST)
    # The kernel deletes the veth pair together with the namespace, a moment later: the pair may be gone already.
    shell.succeeds(["ip", "link", "delete", HOST_DEVICE])


def _delete(host: Host) -> None:
    if host.exists:
        shell.output(["ip", "netns", "delete", host.namespace])


def _add(host: Host) -> None:
    shell.output(["ip", "netns", "add", host.namespace])
    shell.output([*host.inside, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"])


def _bring_up(host: Host) -> None:
    _ip(host, "address", "add", f"{host.address}/30", "dev", "eth0")
    for device in ("lo", "eth0"):
        _ip(host, "link", "set", device, "up")


def _peer(host: Host) -> tuple[str, ...]:
    return ("peer", "name", "eth0", "netns", host.namespace)


def _close() -> None:
    """Reject packets to addresses outside the cluster, at once rather than after a timeout."""
    _iptables("-N", CHAIN)
    # Pod and Service networks too: after its redirection, a packet to a Service still has eth0 as its output device.
    for network in (LINKS, POD_NETWORK, SERVICE_NETWORK):
        _iptables("-A", CHAIN, "-d", network, "-j", "RETURN")
    _iptables("-A", CHAIN, "-j", "REJECT")
    for chain in ("OUTPUT", "FORWARD"):
        _iptables("-I", chain, "-o", "eth0", "-j", CHAIN)


def _iptables(*words: str) -> None:
    shell.output([*FIRST.inside, "iptables", "-w", *words])


def _ip(host: Host, *words: str) -> None:
    shell.output(["ip", "-n", host.namespace, *words])

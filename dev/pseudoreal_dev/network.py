"""The cluster's network namespace, from which no packet leaves the machine."""

from pathlib import Path

from . import shell

NAMESPACE = "pseudoreal"
HANDLE = Path("/run/netns") / NAMESPACE
HOST_DEVICE = "pseudoreal0"
HOST_ADDRESS = "198.18.0.1"
NODE_ADDRESS = "198.18.0.2"
LINK = "198.18.0.0/30"
POD_NETWORK = "10.244.0.0/16"
SERVICE_NETWORK = "10.96.0.0/16"
CHAIN = "PSEUDOREAL"
# Not `ip netns exec`: that remounts /sys, and the cgroups are gone.
INSIDE = ("nsenter", f"--net={HANDLE}")


def create() -> None:
    """Makes the namespace and the pair of devices that joins it to this machine."""
    shell.output(["ip", "netns", "add", NAMESPACE])
    peer = ["peer", "name", "eth0", "netns", NAMESPACE]
    shell.output(["ip", "link", "add", HOST_DEVICE, "type", "veth", *peer])
    shell.output(["ip", "address", "add", f"{HOST_ADDRESS}/30", "dev", HOST_DEVICE])
    shell.output(["ip", "link", "set", HOST_DEVICE, "up"])
    shell.output(["ip", "-n", NAMESPACE, "address", "add", f"{NODE_ADDRESS}/30", "dev", "eth0"])
    for device in ("lo", "eth0"):
        shell.output(["ip", "-n", NAMESPACE, "link", "set", device, "up"])
    # Nothing answers there, but the kubelet, the API server and kube-proxy choose their address by a default route.
    shell.output(["ip", "-n", NAMESPACE, "route", "add", "default", "dev", "eth0"])
    shell.output([*INSIDE, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"])
    # The address of a pod that is gone is answered at once.
    shell.output(["ip", "-n", NAMESPACE, "route", "add", "unreachable", POD_NETWORK])
    _close()


def _close() -> None:
    """Refuses, at once rather than after a time-out, whatever is not for the cluster."""
    shell.output([*INSIDE, "iptables", "-w", "-N", CHAIN])
    # The last two: a packet to a Service keeps its first way out, eth0, in the rules that follow its redirection.
    for network in (LINK, POD_NETWORK, SERVICE_NETWORK):
        shell.output([*INSIDE, "iptables", "-w", "-A", CHAIN, "-d", network, "-j", "RETURN"])
    shell.output([*INSIDE, "iptables", "-w", "-A", CHAIN, "-j", "REJECT"])
    for chain in ("OUTPUT", "FORWARD"):
        shell.output([*INSIDE, "iptables", "-w", "-I", chain, "-o", "eth0", "-j", CHAIN])


def delete() -> None:
    """Removes what `create` made, as far as it is there."""
    if exists():
        shell.output(["ip", "netns", "delete", NAMESPACE])
    # The kernel takes the pair away with its namespace, a moment later; whichever deletes it first is right.
    shell.succeeds(["ip", "link", "delete", HOST_DEVICE])


def exists() -> bool:
    """Whether the namespace is there; a handle that outlived a crash is a file without one."""
    return HANDLE.exists()

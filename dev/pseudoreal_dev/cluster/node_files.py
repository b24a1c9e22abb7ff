"""Configuration files of the node's programs, as text."""

import json
from collections.abc import Mapping
from pathlib import Path

import yaml

from pseudoreal_dev.cluster.certificates import KeyPair
from pseudoreal_dev.cluster.network import FIRST, POD_NETWORK, Host

DNS_SERVICE = "10.96.0.10"
DOMAIN = "cluster.local"
DNS_READY_PORT = 8181


def kubelet(folder: Path, socket: Path, authority: Path, serving: KeyPair, cgroup: str) -> str:
    """Return the KubeletConfiguration."""
    configuration = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(authority)},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(serving.certificate),
        "tlsPrivateKeyFile": str(serving.key),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroup}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "containerRuntimeEndpoint": f"unix://{socket}",
        "clusterDNS": [DNS_SERVICE],
        "clusterDomain": DOMAIN,
        "resolvConf": str(folder / "resolv.conf"),
        # A developer's disk is often nearly full, and only the tooling itself removes images.
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "podLogsDir": str(folder / "pod-logs"),
        "volumePluginDir": str(folder / "volume-plugins"),
    }
    return yaml.safe_dump(configuration)


def kube_proxy(host: Host, kubeconfig: Path) -> str:
    """Return the KubeProxyConfiguration."""
    configuration = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "clusterCIDR": POD_NETWORK,
        "hostnameOverride": host.node,
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        # These limits belong to the machine, not to a network namespace: leave them unchanged.
        "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
    return yaml.safe_dump(configuration)


def pod_network(host: Host, folder: Path) -> str:
    """Return the CNI network configuration.

    The plugin `ptp` routes all packets between pods. With the plugin `bridge`, Services would need the kernel module
    br_netfilter.
    """
    addresses = {
        "type": "host-local",
        "ranges": [[{"subnet": host.pods}]],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dataDir": str(folder / "addresses"),
    }
    plugins: list[Mapping[str, object]] = [
        {"type": "ptp", "ipam": addresses},
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ]
    return json.dumps({"cniVersion": "1.0.0", "name": "pseudoreal", "plugins": plugins})


def corefile(kubeconfig: Path, context: str) -> str:
    """Return CoreDNS's configuration: the cluster's names only, because no packet leaves the cluster."""
    return f"""\
. {{
    bind {FIRST.address}
    errors
    ready {FIRST.address}:{DNS_READY_PORT}
    kubernetes {DOMAIN} in-addr.arpa ip6.arpa {{
        kubeconfig {kubeconfig} {context}
        pods insecure
    }}
}}
"""

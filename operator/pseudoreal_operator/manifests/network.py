"""Parts of a pod that spec.network requests: environment, devices, volumes, capabilities. Pure.

A pod without its own network settings, such as the pod of a delink, has a Network with all defaults, which adds nothing
to the pod.
"""

from typing import Any
from zlib import crc32

from pseudoreal_api.names import CONFIG_DIRECTORY, NCCL_CONFIG_FILE, RENDEZVOUS_PORT
from pseudoreal_api.quantity import bytes_of, quantity_of
from pseudoreal_api.spec.job import PseudoRealJob, PseudoRealJobSpec
from pseudoreal_api.spec.network import Network
from pseudoreal_api.spec.phase import Phase, Resources

Json = dict[str, Any]

NETWORKS_ANNOTATION = "k8s.v1.cni.cncf.io/networks"
HUGE_PAGES_DIRECTORY = "/hugepages"
_NCCL_DIRECTORY = "/etc/pseudoreal-nccl"
"""Mount path of the user's own ConfigMap. A file cannot be mounted below CONFIG_DIRECTORY, which is read-only."""

# Below the ports that kernels give to clients (32768..), and that Kubernetes gives to node ports (30000..).
_HOST_PORTS = range(20_000, 30_000)

# NCCL_NET keeps NCCL from silently falling back to another network.
_MODES: dict[str, dict[str, str]] = {
    "Auto": {},
    "Socket": {"NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"},
    "RDMA": {"NCCL_IB_DISABLE": "0", "NCCL_NET": "IB"},
}


def environment(network: Network) -> dict[str, str]:
    found = dict(_MODES[network.mode])
    if network.interface:
        found["NCCL_SOCKET_IFNAME"] = network.interface
        # gloo takes only whole interface names: neither NCCL's exclusions (^) nor its = sign.
        if not network.interface.startswith("^"):
            found["GLOO_SOCKET_IFNAME"] = network.interface.removeprefix("=")
    if network.ib_adapters:
        found["NCCL_IB_HCA"] = network.ib_adapters
    if network.gid_index is not None:
        found["NCCL_IB_GID_INDEX"] = str(network.gid_index)
    return found


def nccl_config(network: Network, *, of_site: bool) -> dict[str, str]:
    """Return the variable that names NCCL's file: the job's own, else the site's; empty if there is neither."""
    directory = _NCCL_DIRECTORY if network.nccl_config_map_name else CONFIG_DIRECTORY if of_site else None
    return {"NCCL_CONF_FILE": f"{directory}/{NCCL_CONFIG_FILE}"} if directory else {}


def host_environment(network: Network) -> list[Json]:
    """Return the variables for pods in the network of their node: the IP address to give to other pods. Trainers up to
    0.3 would give the name of the node, but other pods cannot resolve this name."""
    if not network.host_network:
        return []
    return [{"name": "PET_LOCAL_ADDR", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]


def resources(network: Network, given: Resources) -> Json:
    """Return the resources of a pod: the phase's, adapters and huge pages, and the memory of /dev/shm on top."""
    extra = _devices(network)
    limits, requests = (_with_shared_memory(network, amounts) for amounts in (given.limits, given.requests))
    return Resources(limits=limits | extra, requests=requests | extra).to_dict()


def _devices(network: Network) -> dict[str, int | str]:
    found: dict[str, int | str] = {}
    if network.rdma_resource:
        found[network.rdma_resource] = network.rdma_count
    if network.huge_pages:
        found[f"hugepages-{network.huge_pages.page_size}"] = network.huge_pages.amount
    return found


def _with_shared_memory(network: Network, amounts: dict[str, int | str]) -> dict[str, int | str]:
    if network.shared_memory is None or "memory" not in amounts:
        return amounts
    return amounts | {"memory": quantity_of(bytes_of(amounts["memory"]) + bytes_of(network.shared_memory))}


def volumes(network: Network) -> list[Json]:
    found: list[Json] = []
    if network.nccl_config_map_name:
        items = [{"key": NCCL_CONFIG_FILE, "path": NCCL_CONFIG_FILE}]
        found.append({"name": "nccl-config", "configMap": {"name": network.nccl_config_map_name, "items": items}})
    if network.shared_memory is not None:
        size = str(network.shared_memory)
        found.append({"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": size}})
    if network.huge_pages:
        found.append({"name": "huge-pages", "emptyDir": {"medium": f"HugePages-{network.huge_pages.page_size}"}})
    return found


def mounts(network: Network) -> list[Json]:
    found: list[Json] = []
    if network.nccl_config_map_name:
        found.append({"name": "nccl-config", "mountPath": _NCCL_DIRECTORY, "readOnly": True})
    if network.shared_memory is not None:
        found.append({"name": "shared-memory", "mountPath": "/dev/shm"})
    if network.huge_pages:
        found.append({"name": "huge-pages", "mountPath": HUGE_PAGES_DIRECTORY})
    return found


def capabilities(network: Network) -> Json:
    """Return the capabilities of the container: RDMA adapters reach only locked memory."""
    uses_rdma = network.mode == "RDMA" or (network.mode == "Auto" and network.rdma_resource is not None)
    return {"drop": ["ALL"]} | ({"add": ["IPC_LOCK"]} if uses_rdma else {})


def annotations(network: Network) -> dict[str, str]:
    return {NETWORKS_ANNOTATION: ",".join(network.networks)} if network.networks else {}


def pod_fields(network: Network) -> Json:
    """Return the fields of a pod in its node's network. Without this DNS policy the pod could not resolve the names of
    the other pods."""
    return {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if network.host_network else {}


def rendezvous_port(job: PseudoRealJob) -> int:
    """Return the port of the rendezvous. In the network of a node, jobs share the node's ports, so the port is derived
    from the job's uid: two jobs rarely have the same port."""
    if not job.spec.network.host_network:
        return RENDEZVOUS_PORT
    return _HOST_PORTS[crc32(job.metadata.uid.encode()) % len(_HOST_PORTS)]


def check_network(spec: PseudoRealJobSpec) -> None:
    """Check spec.network. Raises ValueError for values that Kubernetes would reject in the pods."""
    pages = spec.network.huge_pages
    if pages and (bytes_of(pages.amount) == 0 or bytes_of(pages.amount) % bytes_of(pages.page_size)):
        raise ValueError(
            f"spec.network.hugePages.amount {pages.amount} must be a multiple of pageSize {pages.page_size}, and not 0"
        )
    for phase in spec.phases:
        _check_resources(spec.network, phase)


def _check_resources(network: Network, phase: Phase) -> None:
    where, given = f"spec.phases[{phase.name}].resources", phase.resources.limits | phase.resources.requests
    if network.huge_pages and not {"cpu", "memory"} & given.keys():
        raise ValueError(
            f"{where} has neither cpu nor memory, one of which Kubernetes wants beside spec.network.hugePages; set one"
        )
    for name in _devices(network):
        if name in given:
            raise ValueError(
                f"{where} sets {name} to {given[name]}, and spec.network sets it too; remove it from the resources"
            )

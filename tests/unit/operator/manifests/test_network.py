"""Effects of spec.network on the children: only in training phases, and none by default."""

from typing import Any

import pytest
from pseudoreal_operator.lifecycle.acceptance import check
from pseudoreal_operator.manifests.network import rendezvous_port

from tests.unit.operator.manifests.support.rendered import (
    DELINK,
    SITE,
    TRAIN,
    container,
    container_of,
    environment,
    environment_of,
    files_of,
    made,
    pod,
    rendered,
)
from tests.unit.operator.support.world import UID, make_job

Json = dict[str, Any]

EVERYTHING = {
    "mode": "RDMA",
    "interface": "=eth0",
    "ibAdapters": "mlx5_0,mlx5_1",
    "gidIndex": 3,
    "ncclConfigMapName": "tuned",
    "rdmaResource": "rdma/shared_a",
    "rdmaCount": 2,
    "networks": ["fabric-a", "net-system/fabric-b"],
    "hostNetwork": True,
    "sharedMemory": "8Gi",
    "hugePages": {"amount": "1Gi"},
}
MEMORY = {"spec__phases__1__resources": {"limits": {"memory": "16Gi"}}}


def template(**changes: Any) -> Json:
    found: Json = made(**changes)["Job"]["spec"]["template"]
    return found


def nccl(**network: Any) -> dict[str, str]:
    found = environment(spec__network=network)
    return {name: value for name, value in found.items() if name.startswith(("NCCL_", "GLOO_"))}


def test_delink_ignores_network_settings_and_has_only_a_job() -> None:
    """A delink is one process that copies bytes."""
    with_all = made(DELINK, spec__network=EVERYTHING, **MEMORY)
    assert with_all["Job"] == made(DELINK, **MEMORY)["Job"]
    assert list(with_all) == ["Job"]


def test_network_defaults_request_nothing() -> None:
    assert nccl() == {}
    assert not {"hostNetwork", "dnsPolicy", "affinity"} & pod().keys()
    assert not [name for name in template()["metadata"]["annotations"] if "networks" in name]
    assert {volume["name"] for volume in pod()["volumes"]} == {"config", "checkpoints", "tmp", "rendezvous"}


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        ({"mode": "Socket"}, {"NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}),
        ({"mode": "RDMA", "rdmaResource": "rdma/a"}, {"NCCL_IB_DISABLE": "0", "NCCL_NET": "IB"}),
        ({"ibAdapters": "=mlx5_0:1", "gidIndex": 0}, {"NCCL_IB_HCA": "=mlx5_0:1", "NCCL_IB_GID_INDEX": "0"}),
        ({"interface": "eth0"}, {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}),
        # gloo takes whole names: NCCL's sign for them would be part of one, and it cannot be told what not to take.
        ({"interface": "=eth0,eth1"}, {"NCCL_SOCKET_IFNAME": "=eth0,eth1", "GLOO_SOCKET_IFNAME": "eth0,eth1"}),
        ({"interface": "^docker"}, {"NCCL_SOCKET_IFNAME": "^docker"}),
    ],
)
def test_the_environment_of_nccl_and_gloo(network: Json, expected: dict[str, str]) -> None:
    assert nccl(**network) == expected


def test_users_environment_overrides_network_settings() -> None:
    changes = {"spec__network": {"mode": "Socket"}, "spec__pod": {"env": [{"name": "NCCL_NET", "value": "mine"}]}}
    assert environment(**changes)["NCCL_NET"] == "mine"


@pytest.mark.parametrize(
    ("network", "added"),
    [
        ({}, None),
        ({"mode": "RDMA", "rdmaResource": "rdma/a"}, ["IPC_LOCK"]),
        ({"mode": "RDMA", "hostNetwork": True}, ["IPC_LOCK"]),
        ({"mode": "Auto", "rdmaResource": "rdma/a"}, ["IPC_LOCK"]),
        ({"mode": "Auto", "hostNetwork": True}, None),
        ({"mode": "Socket", "rdmaResource": "rdma/a"}, None),
    ],
)
def test_memory_may_be_locked_only_where_adapters_need_it(network: Json, added: list[str] | None) -> None:
    capabilities = container(spec__network=network)["securityContext"]["capabilities"]
    assert capabilities == {"drop": ["ALL"]} | ({"add": added} if added else {})


def test_adapters_are_requested_and_limited() -> None:
    network = {"rdmaResource": "rdma/shared_a", "rdmaCount": 2}
    changes = {"spec__network": network, "spec__phases__1__resources": {"limits": {"cpu": 1}, "requests": {"cpu": 1}}}
    assert container(**changes)["resources"] == {
        "limits": {"cpu": 1, "rdma/shared_a": 2},
        "requests": {"cpu": 1, "rdma/shared_a": 2},
    }


def test_attached_networks_become_an_annotation() -> None:
    found = template(spec__network={"networks": ["fabric-a", "net-system/fabric-b"]})
    assert found["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] == "fabric-a,net-system/fabric-b"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"limits": {"memory": "16Gi"}}, {"limits": {"memory": "24Gi"}, "requests": {}}),
        (
            {"limits": {"memory": "16Gi", "cpu": 2}, "requests": {"memory": "1536Mi"}},
            {"limits": {"memory": "24Gi", "cpu": 2}, "requests": {"memory": "9728Mi"}},
        ),
        ({"requests": {"memory": 1}}, {"limits": {}, "requests": {"memory": "8589934593"}}),
        ({"limits": {"memory": "1G"}}, {"limits": {"memory": "9589934592"}, "requests": {}}),
        ({"limits": {"cpu": 1}}, {"limits": {"cpu": 1}, "requests": {}}),
    ],
)
def test_shared_memory_is_added_to_the_memory_request(given: Json, expected: Json) -> None:
    changes = {"spec__network": {"sharedMemory": "8Gi"}, "spec__phases__1__resources": given}
    assert container(**changes)["resources"] == expected
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in pod(**changes)["volumes"]
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container(**changes)["volumeMounts"]


@pytest.mark.parametrize("size", ["2Mi", "1Gi"])
def test_huge_pages_are_requested_and_mounted(size: str) -> None:
    changes = {"spec__network": {"hugePages": {"pageSize": size, "amount": "2Gi"}}, **MEMORY}
    resources = container(**changes)["resources"]
    assert resources["limits"] == {"memory": "16Gi", f"hugepages-{size}": "2Gi"}
    assert resources["requests"] == {f"hugepages-{size}": "2Gi"}
    assert {"name": "huge-pages", "emptyDir": {"medium": f"HugePages-{size}"}} in pod(**changes)["volumes"]
    assert {"name": "huge-pages", "mountPath": "/hugepages"} in container(**changes)["volumeMounts"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"spec__network": {"hugePages": {"amount": "3Mi"}}, **MEMORY},
            "spec.network.hugePages.amount 3Mi must be a multiple of pageSize 2Mi",
        ),
        ({"spec__network": {"hugePages": {"amount": 0}}, **MEMORY}, "hugePages.amount 0 must be .* and not 0"),
        (
            {"spec__network": {"hugePages": {"amount": "2Mi"}}},
            r"spec.phases\[pseudo\].resources has neither cpu nor memory",
        ),
        (
            {"spec__network": {"rdmaResource": "rdma/a"}, "spec__phases__1__resources": {"requests": {"rdma/a": 4}}},
            r"spec.phases\[real\].resources sets rdma/a to 4, and spec.network sets it too",
        ),
    ],
)
def test_network_values_that_kubernetes_rejects_are_invalid(changes: Json, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check(make_job(**changes).spec)


def test_host_network_pods_have_dns_policy_and_address() -> None:
    """The pod finds the others by cluster DNS, is found by its address, and has its node for itself."""
    found = pod(spec__network={"hostNetwork": True})
    assert (found["hostNetwork"], found["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    term = {"labelSelector": {"matchLabels": {"pseudoreal.dev/job-uid": UID}}, "topologyKey": "kubernetes.io/hostname"}
    assert found["affinity"] == {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    address = {"name": "PET_LOCAL_ADDR", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    assert address in container(spec__network={"hostNetwork": True})["env"]


def test_jobs_in_the_host_network_have_different_ports() -> None:
    def port(uid: str) -> int:
        job = make_job(spec__network={"hostNetwork": True})
        job = job.model_copy(update={"metadata": job.metadata.model_copy(update={"uid": uid})})
        return rendezvous_port(job)

    ports = {port(f"{number:08x}-0000-4000-8000-000000000000") for number in range(200)}
    assert len(ports) > 190
    assert all(20_000 <= number < 30_000 for number in ports)
    found = made(spec__network={"hostNetwork": True})
    endpoint = environment_of(found)["PET_RDZV_ENDPOINT"]
    assert endpoint.endswith(f":{port(UID)}")
    assert found["Service"]["spec"]["ports"][0]["port"] == port(UID)


def test_only_pods_of_the_job_reach_its_pods() -> None:
    found = made()
    policy = found["NetworkPolicy"]
    labels = found["Job"]["spec"]["template"]["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert policy["spec"]["podSelector"]["matchLabels"] == found["Service"]["spec"]["selector"]
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    peers = {"podSelector": {"matchLabels": {"pseudoreal.dev/job-uid": UID}}}
    assert policy["spec"]["ingress"] == [{"from": [peers]}]
    assert policy["metadata"] == found["Service"]["metadata"]


@pytest.mark.parametrize("network", [{"isolation": "None"}, {"hostNetwork": True}])
def test_network_policy_is_omitted_if_unwanted_or_useless(network: Json) -> None:
    assert "NetworkPolicy" not in made(spec__network=network)


def test_site_nccl_config_is_mounted() -> None:
    found = rendered(TRAIN, 3, {"settings": SITE})
    assert files_of(found["Job"])["nccl.conf"] == SITE.nccl_config
    assert environment_of(found)["NCCL_CONF_FILE"] == "/etc/pseudoreal/nccl.conf"
    delink = rendered(DELINK, 3, {"settings": SITE})
    assert list(files_of(delink["Job"])) == ["config.json"]
    assert "NCCL_CONF_FILE" not in environment_of(delink)


def test_nccl_config_of_the_job_overrides_that_of_the_site() -> None:
    found = rendered(TRAIN, 3, {"settings": SITE}, spec__network={"ncclConfigMapName": "tuned"})
    assert "nccl.conf" not in files_of(found["Job"])
    path = environment_of(found)["NCCL_CONF_FILE"]
    mounts = {mount["name"]: mount for mount in container_of(found)["volumeMounts"]}
    assert path == f"{mounts['nccl-config']['mountPath']}/nccl.conf"
    assert mounts["nccl-config"]["readOnly"] is True
    items = [{"key": "nccl.conf", "path": "nccl.conf"}]
    volumes = found["Job"]["spec"]["template"]["spec"]["volumes"]
    assert {"name": "nccl-config", "configMap": {"name": "tuned", "items": items}} in volumes

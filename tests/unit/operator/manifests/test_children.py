"""The children as the API server receives them: the fields that matter, one by one."""

import re
from pathlib import Path
from typing import Any

import pytest
from pseudoreal_api.names import is_reserved_variable
from pseudoreal_api.resolved.config import DelinkConfig, PhaseConfig
from pseudoreal_operator.lifecycle.acceptance import check
from pseudoreal_operator.manifests.overlay import merge
from pseudoreal_operator.observe.stages import Stage, StageKind

from tests.support.names import bare
from tests.unit.operator.manifests.support.rendered import (
    DELINK,
    TRAIN,
    config_of,
    container,
    environment,
    environment_of,
    made,
    pod,
    pod_of,
)
from tests.unit.operator.support.world import SETTINGS, UID, make_job

Json = dict[str, Any]


def test_the_job_is_made_last() -> None:
    assert list(made()) == ["Service", "NetworkPolicy", "Secret", "Job"]
    assert list(made(DELINK)) == ["Job"]


@pytest.mark.parametrize(("stage", "name"), [(TRAIN, "sim-real-e3"), (DELINK, "sim-real-delink-e3")])
def test_children_have_names_labels_and_owner(stage: Stage, name: str) -> None:
    for child in made(stage).values():
        metadata = child["metadata"]
        assert metadata["namespace"] == "default"
        (owner,) = metadata["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("PseudoRealJob", UID, True)
        assert metadata["labels"]["pseudoreal.dev/job-name"] == "sim"
        assert metadata["labels"]["pseudoreal.dev/job-uid"] == UID
    job = made(stage)["Job"]
    assert bare(job["metadata"]["name"]) == name != job["metadata"]["name"]
    assert job["metadata"]["labels"]["pseudoreal.dev/phase"] == "real"
    assert job["metadata"]["labels"]["pseudoreal.dev/execution"] == "3"
    assert job["metadata"]["labels"]["pseudoreal.dev/stage"] == stage.kind.value
    declined = {"sidecar.istio.io/inject": "false"}
    assert job["spec"]["template"]["metadata"]["labels"] == job["metadata"]["labels"] | declined


def test_the_configuration_is_the_contract_s() -> None:
    config = config_of(made()["Job"])
    assert isinstance(config, PhaseConfig)
    assert (config.phase, config.index, config.execution, config.workers) == ("real", 1, 3, 2)
    assert config.work_directory == f"/checkpoints/sim-{UID[:8]}"
    delink = config_of(made(DELINK)["Job"])
    assert isinstance(delink, DelinkConfig)
    assert (delink.from_phase, delink.phase, delink.to_sharing.blocks) == ("pseudo", "real", 8)
    assert delink.work_directory == config.work_directory


def test_job_runs_all_workers_and_replaces_none() -> None:
    spec = made()["Job"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert (spec["backoffLimitPerIndex"], spec["podReplacementPolicy"]) == (0, "Failed")
    assert made(DELINK)["Job"]["spec"]["completions"] == 1
    assert pod()["restartPolicy"] == "Never"


def test_one_service_one_policy_and_one_secret_are_for_all_executions() -> None:
    """Only the Job belongs to one execution."""
    first, second = made(execution=1), made(execution=2)
    assert [first[kind] == second[kind] for kind in first] == [True, True, True, False]
    pseudo = made(Stage(0, "pseudo", StageKind.TRAIN), spec__phases__0__workers=2)
    assert [pseudo[kind] for kind in ("Service", "NetworkPolicy", "Secret")] == [*first.values()][:3]


def test_workers_that_meet_find_the_secret_of_their_job_in_a_file() -> None:
    """Not in the environment, which anyone who may read pods sees. The Secret's data is generated at its creation."""
    secret = made()["Secret"]
    assert (secret["type"], secret["immutable"]) == ("Opaque", True)
    assert not {"data", "stringData"} & secret.keys()
    path = Path(environment()["PSEUDOREAL_RENDEZVOUS_SECRET"])
    (mount,) = [mount for mount in container()["volumeMounts"] if mount["mountPath"] == str(path.parent)]
    (volume,) = [volume for volume in pod()["volumes"] if volume["name"] == mount["name"]]
    assert volume["secret"]["secretName"] == secret["metadata"]["name"]
    assert volume["secret"]["items"] == [{"key": path.name, "path": path.name}]
    assert mount["readOnly"]


def test_a_worker_alone_and_a_delink_have_no_secret() -> None:
    for found in (made(spec__phases__1__workers=1), made(DELINK)):
        assert "Secret" not in found
        assert "PSEUDOREAL_RENDEZVOUS_SECRET" not in environment_of(found)
        assert "rendezvous" not in {volume["name"] for volume in pod_of(found)["volumes"]}


def test_the_service_finds_the_training_pods_before_they_are_ready() -> None:
    service, job = made()["Service"]["spec"], made()["Job"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    assert not service["selector"].items() <= made(DELINK)["Job"]["spec"]["template"]["metadata"]["labels"].items()
    assert pod()["subdomain"] == made()["Service"]["metadata"]["name"]


def test_torchrun_is_told_by_the_environment() -> None:
    found = environment(spec__phases__1__processesPerWorker=2)
    assert found["PET_NNODES"] == "2"
    assert found["PET_NPROC_PER_NODE"] == "2"
    job, service = (made()[kind]["metadata"]["name"] for kind in ("Job", "Service"))
    assert found["PET_RDZV_ENDPOINT"] == f"{job}-0.{service}:29500"
    assert found["PET_RDZV_ID"] == f"{UID}-real-3"
    assert (found["PET_RDZV_BACKEND"], found["PET_MAX_RESTARTS"]) == ("c10d", "0")
    rank = next(e for e in container()["env"] if e["name"] == "PET_NODE_RANK")
    path = rank["valueFrom"]["fieldRef"]["fieldPath"]
    assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert not any(name.startswith("PET_") for name in environment(DELINK))


def test_no_stale_worker_can_join_a_later_execution() -> None:
    ids = {child["Job"]["metadata"]["name"]: child for child in (made(execution=1), made(execution=2))}
    found = {
        name: next(
            e["value"]
            for e in child["Job"]["spec"]["template"]["spec"]["containers"][0]["env"]
            if e["name"] == "PET_RDZV_ID"
        )
        for name, child in ids.items()
    }
    assert len(set(found.values())) == 2


def test_the_pod_asks_for_no_right_it_does_not_need() -> None:
    spec, security = pod(), container()["securityContext"]
    assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False)
    assert (spec["securityContext"]["runAsNonRoot"], spec["securityContext"]["runAsUser"]) == (True, 10001)
    assert spec["securityContext"]["fsGroup"] == 10001
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert (security["allowPrivilegeEscalation"], security["readOnlyRootFilesystem"]) == (False, True)
    assert security["capabilities"] == {"drop": ["ALL"]}


def test_read_only_root_has_a_writable_tmp() -> None:
    mounts = {mount["mountPath"]: mount for mount in container()["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod()["volumes"]}
    assert volumes[mounts["/tmp"]["name"]] == {"name": "tmp", "emptyDir": {}}
    assert environment()["HOME"] == "/tmp"
    assert volumes[mounts["/checkpoints"]["name"]]["persistentVolumeClaim"] == {"claimName": "checkpoints"}
    files = volumes[mounts["/etc/pseudoreal"]["name"]]["downwardAPI"]["items"]
    assert [file["path"] for file in files] == ["config.json"]
    assert container()["command"][-1] == "/etc/pseudoreal/config.json"


def test_pod_has_a_grace_period_and_a_termination_message() -> None:
    assert pod()["terminationGracePeriodSeconds"] == 120
    assert environment()["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "100"
    assert container()["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert environment()["PSEUDOREAL_TERMINATION_LOG"] == container()["terminationMessagePath"]


@pytest.mark.parametrize(("grace", "shutdown"), [(1, 1), (2, 1), (6, 5), (30, 25), (121, 101), (86_400, 86_380)])
def test_ranks_are_killed_a_little_before_the_pod(grace: int, shutdown: int) -> None:
    """torchrun accepts only whole seconds, and the kubelet no grace period below two."""
    changes = {"spec__pod": {"terminationGracePeriodSeconds": grace}}
    assert pod(**changes)["terminationGracePeriodSeconds"] == grace
    assert pod(DELINK, **changes)["terminationGracePeriodSeconds"] == grace
    assert environment(**changes)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == str(shutdown)


@pytest.mark.parametrize("stage", [TRAIN, DELINK])
def test_checkpoints_in_object_storage_need_no_claim(stage: Stage) -> None:
    """The pod keeps only metrics.jsonl, in its own folder."""
    objects = {"url": "s3://bucket/prefix/", "endpoint": "http://minio:9000", "credentialsSecretName": "s3"}
    changes = {"spec__checkpoint": {"storage": {"type": "ObjectStorage", "objectStorage": objects}}}
    assert {"name": "work", "emptyDir": {}} in pod(stage, **changes)["volumes"]
    assert "checkpoints" not in {volume["name"] for volume in pod(stage, **changes)["volumes"]}
    assert {"name": "work", "mountPath": "/scratch"} in container(stage, **changes)["volumeMounts"]
    assert environment(stage, **changes)["AWS_ENDPOINT_URL"] == "http://minio:9000"
    config = config_of(made(stage, **changes)["Job"])
    assert config.storage == f"s3://bucket/prefix/sim-{UID[:8]}"
    assert config.work_directory == f"/scratch/sim-{UID[:8]}"


@pytest.mark.parametrize("stage", [TRAIN, DELINK])
def test_only_four_keys_of_the_credentials_become_variables(stage: Stage) -> None:
    """Otherwise the author of the Secret could set RANK, MASTER_ADDR or PSEUDOREAL_OUTCOME_DIRECTORY."""
    objects = {"url": "s3://bucket", "credentialsSecretName": "s3"}
    changes = {"spec__checkpoint": {"storage": {"type": "ObjectStorage", "objectStorage": objects}}}
    assert "envFrom" not in container(stage, **changes)
    refs = {e["name"]: e["valueFrom"]["secretKeyRef"] for e in container(stage, **changes)["env"] if "AWS" in e["name"]}
    assert all((ref["name"], ref["key"]) == ("s3", name) for name, ref in refs.items())
    needed = {name for name, ref in refs.items() if not ref.get("optional")}
    assert needed == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    assert refs.keys() - needed == {"AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION"}


def test_keys_of_azure_become_variables_in_each_of_their_forms() -> None:
    objects = {"url": "az://container", "credentialsSecretName": "keys"}
    changes = {"spec__checkpoint": {"storage": {"type": "ObjectStorage", "objectStorage": objects}}}
    refs = {e["name"]: e["valueFrom"]["secretKeyRef"] for e in container(**changes)["env"] if "AZURE" in e["name"]}
    names = [f"AZURE_STORAGE_{key}" for key in ("ACCOUNT_KEY", "ACCOUNT_NAME", "CONNECTION_STRING", "SAS_TOKEN")]
    assert sorted(refs) == names
    assert all(ref == {"name": "keys", "key": name, "optional": True} for name, ref in refs.items())


def test_a_variable_of_the_user_s_replaces_a_whole_one_of_the_operator_s() -> None:
    """The API server rejects an entry with both a value and valueFrom."""
    objects = {"url": "s3://bucket", "endpoint": "http://minio:9000", "credentialsSecretName": "s3"}
    of_map = {"configMapKeyRef": {"name": "site", "key": "endpoint"}}
    env = [{"name": "AWS_ACCESS_KEY_ID", "value": "mine"}, {"name": "AWS_ENDPOINT_URL", "valueFrom": of_map}]
    storage = {"type": "ObjectStorage", "objectStorage": objects}
    found = container(spec__checkpoint={"storage": storage}, spec__pod={"env": env})["env"]
    assert all(entry in found for entry in env)
    assert len({entry["name"] for entry in found}) == len(found)


def test_object_storage_of_the_cloud_needs_neither_keys_nor_endpoint() -> None:
    changes = {"spec__checkpoint": {"storage": {"type": "ObjectStorage", "objectStorage": {"url": "s3://bucket"}}}}
    assert "envFrom" not in container(**changes)
    assert "AWS_ENDPOINT_URL" not in environment(**changes)


def test_pod_settings_of_a_phase_override_those_of_the_job() -> None:
    job = {
        "image": "registry.example/mine:1",
        "env": [{"name": "BOTH", "value": "job"}, {"name": "JOB", "value": "1"}],
        "terminationGracePeriodSeconds": 300,
        "template": {"spec": {"nodeSelector": {"pool": "a", "zone": "z"}}},
    }
    secret = {"secretKeyRef": {"name": "keys", "key": "token"}}
    phase = {
        "image": "registry.example/mine:2",
        "env": [{"name": "BOTH", "valueFrom": secret}],
        "template": {"spec": {"nodeSelector": {"pool": "b"}}},
    }
    changes = {"spec__pod": job, "spec__phases__1__pod": phase}
    found, trainer = pod(**changes), container(**changes)
    assert (found["nodeSelector"], found["terminationGracePeriodSeconds"]) == ({"pool": "b", "zone": "z"}, 300)
    assert trainer["image"] == "registry.example/mine:2"
    assert {"name": "BOTH", "valueFrom": secret} in trainer["env"]
    assert {"name": "JOB", "value": "1"} in trainer["env"]
    # A delink has no phase of its own.
    assert (pod(DELINK, **changes)["nodeSelector"], container(DELINK, **changes)["image"]) == (
        {"pool": "a", "zone": "z"},
        "registry.example/mine:1",
    )


def test_corpus_volume_is_mounted_read_only() -> None:
    claim = {"persistentVolumeClaim": {"claimName": "text"}}
    changes = {"spec__data": {"path": "/data", "volume": claim}}
    assert {"name": "data"} | claim in pod(**changes)["volumes"]
    mount = next(m for m in container(**changes)["volumeMounts"] if m["mountPath"] == "/data")
    assert mount["readOnly"] is True


@pytest.mark.parametrize(
    "offload",
    [
        {"home": "Disk"},
        {"homes": [{"unit": "embedding", "home": "Host"}, {"unit": "blocks.7", "home": "Disk"}]},
        {"budget": {"device": "1Gi"}},
    ],
)
def test_state_that_may_be_on_disk_has_a_volume(offload: Json) -> None:
    changes = {"spec__phases__1__offload": offload}
    (volume,) = [volume for volume in pod(**changes)["volumes"] if volume["name"] == "offload"]
    assert list(volume["emptyDir"]) == ["sizeLimit"]
    config = config_of(made(**changes)["Job"])
    assert isinstance(config, PhaseConfig)
    assert {"name": "offload", "mountPath": config.offload_directory} in container(**changes)["volumeMounts"]
    # A delink reads and writes checkpoints only.
    assert "offload" not in {volume["name"] for volume in pod(DELINK, **changes)["volumes"]}


def test_offload_volume_is_the_users_choice() -> None:
    claim = {"ephemeral": {"volumeClaimTemplate": {"spec": {"storageClassName": "nvme"}}}}
    changes = {"spec__phases__1__offload": {"home": "Disk", "volume": claim}}
    assert {"name": "offload"} | claim in pod(**changes)["volumes"]


@pytest.mark.parametrize("offload", [{}, {"home": "Host"}, {"volume": {"hostPath": {"path": "/nvme"}}}])
def test_state_that_is_never_on_disk_has_no_volume(offload: Json) -> None:
    changes = {"spec__phases__1__offload": offload}
    assert "offload" not in {volume["name"] for volume in pod(**changes)["volumes"]}
    assert "/offload" not in {mount["mountPath"] for mount in container(**changes)["volumeMounts"]}


def test_weights_are_mounted_in_the_first_phase() -> None:
    claim = {"persistentVolumeClaim": {"claimName": "llama"}}
    weights = {"path": "/weights", "volume": claim}
    changes = {"spec__checkpoint__startFrom": {"type": "HuggingFace", "huggingFace": weights}}
    first = Stage(0, "pseudo", StageKind.TRAIN)
    assert {"name": "weights"} | claim in pod(first, **changes)["volumes"]
    assert {"name": "weights", "mountPath": "/weights", "readOnly": True} in container(first, **changes)["volumeMounts"]
    config = config_of(made(first, **changes)["Job"])
    assert isinstance(config, PhaseConfig)
    assert config.start_from is not None
    # Later phases begin with what their delinks made.
    for later in (TRAIN, DELINK):
        assert "weights" not in {volume["name"] for volume in pod(later, **changes)["volumes"]}
    config = config_of(made(TRAIN, **changes)["Job"])
    assert isinstance(config, PhaseConfig)
    assert config.start_from is None


def test_gpus_set_nccl_debug_and_are_kept_from_delinks() -> None:
    limits = {"nvidia.com/gpu": 4, "memory": "16Gi"}
    changes = {"spec__phases__1__resources": {"limits": limits}, "spec__phases__1__batch": {"sequences": 8}}
    found = environment(**changes)
    assert (found["NCCL_DEBUG"], found["PET_NPROC_PER_NODE"]) == ("WARN", "4")
    assert container(**changes)["resources"]["limits"] == limits
    # A delink copies bytes.
    assert container(DELINK, **changes)["resources"]["limits"] == {"memory": "16Gi"}
    assert "NCCL_DEBUG" not in environment()


@pytest.mark.parametrize("resources", [{"limits": {"amd.com/gpu": 2}}, {"limits": {"nvidia.com/mig-1g.10gb": 2}}])
def test_pods_that_ask_for_no_accelerator_are_shown_none(resources: dict[str, Any]) -> None:
    """Images with CUDA ask for all GPUs of the node, and where NVIDIA's runtime is the default they get them."""
    assert environment()["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert environment(DELINK)["NVIDIA_VISIBLE_DEVICES"] == "void"
    asked = {"spec__phases__1__resources": resources, "spec__phases__1__batch": {"sequences": 8}}
    assert "NVIDIA_VISIBLE_DEVICES" not in environment(**asked)
    claims = {"spec": {"containers": [{"name": "trainer", "resources": {"claims": [{"name": "gpus"}]}}]}}
    assert "NVIDIA_VISIBLE_DEVICES" not in environment(spec__pod={"template": claims})


def test_image_queue_and_priority_come_from_the_spec() -> None:
    assert (container()["image"], container()["imagePullPolicy"]) == (SETTINGS.trainer_image, "IfNotPresent")
    assert container(spec__pod={"image": "mine:1"})["image"] == "mine:1"
    changes = {"spec__scheduling": {"queue": "gold", "priorityClassName": "high"}}
    assert made(**changes)["Job"]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gold"
    assert pod(**changes)["priorityClassName"] == "high"
    assert "kueue.x-k8s.io/queue-name" not in made()["Job"]["metadata"]["labels"]


def test_the_user_s_environment_is_added() -> None:
    changes = {"spec__pod": {"env": [{"name": "NCCL_DEBUG", "value": "INFO"}, {"name": "MINE", "value": "1"}]}}
    found = environment(spec__phases__1__resources={"limits": {"nvidia.com/gpu": 1}}, **changes)
    assert (found["NCCL_DEBUG"], found["MINE"]) == ("INFO", "1")
    assert found["PET_NNODES"] == "2"


def test_an_overlay_adds_without_taking_away() -> None:
    template = {
        "metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": "rdma"}, "labels": {"team": "blue"}},
        "spec": {
            "nodeSelector": {"pool": "gpu"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "terminationGracePeriodSeconds": 600,
            "containers": [
                {
                    "name": "trainer",
                    "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
                    "env": [{"name": "MINE", "value": "1"}],
                    "volumeMounts": [{"name": "checkpoints", "mountPath": "/second"}],
                },
                {"name": "sidecar", "image": "sidecar:1"},
            ],
            "volumes": [{"name": "scratch", "emptyDir": {}}],
        },
    }
    changed = make_job(spec__pod={"template": template})
    check(changed.spec)
    job = made(spec__pod={"template": template})["Job"]["spec"]["template"]
    spec = job["spec"]
    trainer, sidecar = spec["containers"]
    assert job["metadata"]["labels"]["team"] == "blue"
    assert job["metadata"]["labels"]["pseudoreal.dev/execution"] == "3"
    assert (spec["nodeSelector"], spec["terminationGracePeriodSeconds"]) == ({"pool": "gpu"}, 600)
    assert trainer["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert {"MINE", "PET_NNODES"} <= {e["name"] for e in trainer["env"]}
    assert {"/second", "/checkpoints", "/tmp"} <= {m["mountPath"] for m in trainer["volumeMounts"]}
    assert sidecar == {"name": "sidecar", "image": "sidecar:1"}
    assert {"scratch", "config", "tmp"} <= {v["name"] for v in spec["volumes"]}


@pytest.mark.parametrize("stage", [TRAIN, DELINK])
@pytest.mark.parametrize(
    "template",
    [
        {"metadata": {"labels": None, "annotations": None}},
        {"metadata": {"labels": [1], "annotations": 5}},
        {"metadata": {"annotations": {"pseudoreal.dev/config.json": "{}"}}},
        {"spec": {"containers": [{"name": "trainer", "env": None}]}},
        {"spec": {"containers": [{"name": "trainer", "env": 5}]}},
        {"spec": {"containers": [{"name": "trainer", "env": [{"name": "PET_RDZV_ID", "value": "mine"}]}]}},
    ],
)
def test_no_overlay_removes_indispensable_fields(template: Json, stage: Stage) -> None:
    """Without its labels a pod would not belong to the job; without PET_* each pod would train alone."""
    plain, overlaid = (made(stage, **changes)["Job"]["spec"]["template"] for changes in ({}, _overlay(template)))
    for kind in ("labels", "annotations"):
        own = {word: value for word, value in plain["metadata"][kind].items() if word.startswith("pseudoreal.dev/")}
        assert own.items() <= overlaid["metadata"][kind].items()
    env = [entry for entry in plain["spec"]["containers"][0]["env"] if is_reserved_variable(entry["name"])]
    assert env
    assert all(entry in overlaid["spec"]["containers"][0]["env"] for entry in env)


def test_null_keeps_variables_and_removes_other_fields() -> None:
    nulls = {"securityContext": {"runAsUser": None}, "containers": [{"name": "trainer", "env": None}]}
    assert environment(**_overlay({"spec": nulls})) == environment()
    assert pod(**_overlay({"spec": nulls}))["securityContext"]["runAsUser"] is None


def _overlay(template: Json) -> Json:
    return {"spec__pod": {"template": template}}


@pytest.mark.parametrize(("grace", "shutdown"), [(600, "580"), (30, "25")])
def test_shutdown_timeout_follows_the_grace_period_of_the_template(grace: int, shutdown: str) -> None:
    template = {"spec": {"terminationGracePeriodSeconds": grace}}
    assert pod(**_overlay(template))["terminationGracePeriodSeconds"] == grace
    assert environment(**_overlay(template))["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == shutdown


def test_no_volume_takes_the_name_of_another() -> None:
    source = {"name": "config", "emptyDir": {}}
    changes = {"spec__data": {"path": "/data", "volume": source}, "spec__phases__1__offload": {"home": "Disk"}}
    plain = {volume["name"] for volume in pod(**changes)["volumes"]}
    hostile = changes | {"spec__phases__1__offload": {"home": "Disk", "volume": source}}
    names = [volume["name"] for volume in pod(**hostile)["volumes"]]
    assert sorted(names) == sorted(plain)
    assert {"data", "offload", "config"} <= plain


@pytest.mark.parametrize(
    ("base", "overlay", "merged"),
    [
        ({"a": 1, "b": {"c": 2}}, {"b": {"d": 3}}, {"a": 1, "b": {"c": 2, "d": 3}}),
        ([1, 2], [3], [3]),
        (
            [{"name": "x", "v": 1}],
            [{"name": "y"}, {"name": "x", "w": 2}],
            [{"name": "x", "v": 1, "w": 2}, {"name": "y"}],
        ),
        ([{"name": "x"}], [{"key": "y"}], [{"key": "y"}]),
        ({"a": [1]}, {"a": None}, {"a": None}),
        ([], [{"name": "x"}], [{"name": "x"}]),
    ],
)
def test_merge_merges_maps_and_named_lists(base: Any, overlay: Any, merged: Any) -> None:
    assert merge(base, overlay) == merged


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"spec__pod": {"template": {"metadata": {"labels": {"pseudoreal.dev/execution": "9"}}}}},
            "pseudoreal.dev/execution belongs to the operator",
        ),
        (
            {
                "spec__pod": {
                    "template": {"spec": {"containers": [{"name": "trainer", "env": [{"name": "PET_NNODES"}]}]}}
                }
            },
            "containers[trainer].env: the name PET_NNODES is reserved",
        ),
        (
            {"spec__pod": {"template": {"spec": {"initContainers": [{"name": "i", "env": [{"name": "RANK"}]}]}}}},
            "initContainers[i].env: the name RANK is reserved",
        ),
        ({"spec__phases__1__workers": 5}, "5 data-parallel ranks"),
        (
            {"spec__pod": {"template": {"metadata": {"annotations": {"a": "x" * 66_000}}}}},
            "more than the limit of 65536",
        ),
        ({"spec__data": {"path": "/d", "volume": {"csi": {"a": "x" * 66_000}}}}, "more than the limit of 65536"),
    ],
)
def test_invalid_templates_are_rejected(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        check(make_job(**changes).spec)


STAYS = {
    "sidecar.istio.io/inject": "false",
    "linkerd.io/inject": "disabled",
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}


@pytest.mark.parametrize("stage", [TRAIN, DELINK])
def test_injection_and_eviction_are_declined_by_default(stage: Stage) -> None:
    declined = made(stage)["Job"]["spec"]["template"]["metadata"]
    assert STAYS.items() <= declined["annotations"].items()
    assert declined["labels"]["sidecar.istio.io/inject"] == "false"
    wanted = {"labels": {"sidecar.istio.io/inject": "true"}, "annotations": dict.fromkeys(STAYS, "mine")}
    found = made(stage, **_overlay({"metadata": wanted}))["Job"]["spec"]["template"]["metadata"]
    assert {name: found["annotations"][name] for name in STAYS} == wanted["annotations"]
    assert found["labels"]["sidecar.istio.io/inject"] == "true"

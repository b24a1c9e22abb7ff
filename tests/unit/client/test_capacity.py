"""Whether a job fits onto nodes, compared with a scheduler that places pod after pod."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pseudoreal_api.resolved.resolve import phase_config
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_api.spec.pod import Topology
from pseudoreal_api.status.status import PseudoRealJobStatus
from pseudoreal_client.capacity.fit import PodSet, fit
from pseudoreal_client.capacity.nodes import Node, read_nodes, requests_of
from pseudoreal_client.capacity.pod_sets import PodNeeds, limits_below_needs, pod_set_of, stages_left
from pseudoreal_client.capacity.stage_report import StageReport, traffic_levels
from pseudoreal_operator.observe.claims import Claim
from pseudoreal_operator.observe.stages import StageKind
from pseudoreal_trainer.estimate.report import plan_phase

from tests.support.jobs import good_job
from tests.unit.client.support.golden import golden
from tests.unit.client.support.observed_jobs import UID

Json = dict[str, Any]

GIB = 2**30
GPU = "nvidia.com/gpu"
GPU_TAINT = {"key": GPU, "value": "present", "effect": "NoSchedule"}


def node_body(name: str, **changes: Any) -> Json:
    """Return a node with 8 GPUs."""
    allocatable = {"cpu": "63500m", "memory": "512Gi", GPU: "8", "pods": "110", "ephemeral-storage": "1Ti"}
    body: Json = {
        "metadata": {"name": name, "labels": {"pool": "h100", **changes.pop("labels", {})}},
        "spec": {"taints": changes.pop("taints", []), "unschedulable": changes.pop("cordoned", False)},
        "status": {"conditions": [{"type": "Ready", "status": changes.pop("ready", "True")}]},
    }
    body["status"]["allocatable"] = allocatable | changes
    return body


def pod_body(node: str, uid: str = "", phase: str = "Running", **requests: Any) -> Json:
    labels = {"pseudoreal.dev/job-uid": uid}
    container = {"resources": {"requests": {name.replace("gpu", GPU): amount for name, amount in requests.items()}}}
    return {
        "metadata": {"labels": labels},
        "spec": {"nodeName": node, "containers": [container]},
        "status": {"phase": phase},
    }


def nodes(*bodies: Json, pods: tuple[Json, ...] = (), own: str = "") -> list[Node]:
    return read_nodes(bodies, pods, own)


def gpus(count: int, each: int, **spec: Any) -> PodSet:
    return PodSet(count, {GPU: Fraction(each), "pods": Fraction(1)}, spec)


class TestFreeResources:
    def test_requests_of_running_pods_are_not_free(self) -> None:
        there = [pod_body("a", gpu=2, cpu="500m"), pod_body("a", gpu=1), pod_body("a", "", "Succeeded", gpu=4)]
        (node,) = nodes(node_body("a"), pods=(*there, pod_body("a", UID, gpu=1), pod_body("b", gpu=1)), own=UID)
        assert {name: node.free(name) for name in (GPU, "cpu", "pods")} == {GPU: 5, "cpu": 63, "pods": 108}
        assert node.free("example.com/none") == 0

    def test_a_pod_requests_the_sum_of_its_containers_or_its_largest_init_container(self) -> None:
        spec = {
            "containers": [
                {"resources": {"limits": {"memory": "2Gi", "cpu": 2}, "requests": {"cpu": "500m"}}},
                {"resources": {"requests": {"memory": "1Gi"}}},
            ],
            "initContainers": [
                {"resources": {"requests": {"memory": "8Gi"}}},
                {"restartPolicy": "Always", "resources": {"requests": {"cpu": 1}}},
            ],
            "overhead": {"memory": "1Gi"},
        }
        assert requests_of(spec) == {"memory": 9 * GIB, "cpu": Fraction(3, 2), "pods": 1}


class TestFit:
    def test_pods_fill_one_node_after_the_other(self) -> None:
        found = fit(nodes(node_body("b"), node_body("a"), pods=(pod_body("a", gpu=5),)), gpus(5, 2))
        assert (found.now, found.ever) == ({"a": 1, "b": 4}, {"a": 4, "b": 4})
        assert found.placement == {"a": 1, "b": 4}
        assert found.fits_now

    @given(
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), max_size=4),
        st.integers(1, 12),
        st.integers(0, 4),
        st.integers(1, 4),
        st.booleans(),
    )
    def test_fit_equals_placing_one_pod_after_another(
        self, rooms: list[tuple[int, int, int]], count: int, cpu: int, gpu: int, alone: bool
    ) -> None:
        made = nodes(
            *(node_body(f"n{i}", cpu=str(c), **{GPU: str(g)}) for i, (c, g, _) in enumerate(rooms)),
            pods=tuple(pod_body(f"n{i}", gpu=used) for i, (_, _, used) in enumerate(rooms)),
        )
        term = {"topologyKey": "kubernetes.io/hostname"}
        away = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
        pods = PodSet(count, {"cpu": Fraction(cpu), GPU: Fraction(gpu)}, {"affinity": away} if alone else {})
        left = {f"n{i}": [c, g - used, 0] for i, (c, g, used) in enumerate(rooms)}
        placed = 0
        for _ in range(count):
            free = [room for room in left.values() if room[0] >= cpu and room[1] >= gpu and not (alone and room[2])]
            if free:
                free[0][:] = [free[0][0] - cpu, free[0][1] - gpu, 1]
                placed += 1
        found = fit(made, pods)
        assert sum(found.placement.values()) == placed
        assert found.fits_now == (placed == count)

    @pytest.mark.parametrize(
        ("body", "spec", "says"),
        [
            (node_body("n", cordoned=True), {}, "cordoned"),
            (node_body("n", ready="Unknown"), {}, "not ready"),
            (node_body("n", taints=[GPU_TAINT]), {}, f"taint {GPU}=present:NoSchedule"),
            (node_body("n"), {"nodeSelector": {"pool": "a100"}}, "not selected"),
            (node_body("n", labels={"nvidia.com/gpu.memory": "40960"}), {}, "GPUs with too little memory"),
            (node_body("n", **{GPU: "0"}), {}, f"no {GPU}"),
            (node_body("n", **{GPU: "1"}), {}, f"too little {GPU}"),
        ],
    )
    def test_each_excluded_node_has_its_reason(self, body: Json, spec: Json, says: str) -> None:
        found = fit(nodes(body), replace(gpus(1, 2, **spec), device_bytes=60 * GIB))
        assert found.obstacles["n"].startswith(says)
        assert not found.fits_ever

    def test_pods_that_do_not_fit_now_may_fit_on_empty_nodes(self) -> None:
        found = fit(nodes(node_body("n"), pods=(pod_body("n", gpu=7),)), gpus(1, 2))
        assert found.obstacles == {"n": f"too little {GPU} left"}
        assert (found.fits_now, found.fits_ever) == (False, True)

    @pytest.mark.parametrize(
        "toleration",
        [
            {"operator": "Exists"},
            {"key": GPU, "operator": "Exists"},
            {"key": GPU, "operator": "Exists", "effect": "NoSchedule"},
            {"key": GPU, "value": "present"},
        ],
    )
    def test_taints_exclude_nodes_unless_tolerated(self, toleration: Json) -> None:
        tainted = nodes(node_body("n", taints=[GPU_TAINT, {"key": "soft", "effect": "PreferNoSchedule"}]))
        assert fit(tainted, gpus(1, 1, tolerations=[toleration])).fits_now
        for other in (
            {**toleration, "effect": "NoExecute"},
            {"key": "other", "operator": "Exists"},
            {"key": GPU, "value": "x"},
        ):
            assert not fit(tainted, gpus(1, 1, tolerations=[other])).fits_now

    @pytest.mark.parametrize(
        ("expression", "holds"),
        [
            ({"key": "pool", "operator": "In", "values": ["h100"]}, True),
            ({"key": "pool", "operator": "NotIn", "values": ["h100"]}, False),
            ({"key": "zone", "operator": "NotIn", "values": ["a"]}, True),
            ({"key": "pool", "operator": "Exists"}, True),
            ({"key": "zone", "operator": "Exists"}, False),
            ({"key": "zone", "operator": "DoesNotExist"}, True),
            ({"key": "size", "operator": "Gt", "values": ["7"]}, True),
            ({"key": "size", "operator": "Lt", "values": ["7"]}, False),
            ({"key": "pool", "operator": "Gt", "values": ["7"]}, False),
        ],
    )
    def test_node_affinity_needs_one_matching_term(self, expression: Json, holds: bool) -> None:
        there = nodes(node_body("n", labels={"size": "8"}))

        def fits(*terms: Json) -> bool:
            affinity = {
                "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [*terms]}}
            }
            return fit(there, gpus(1, 1, affinity=affinity)).fits_now

        assert fits({"matchExpressions": [expression]}) is holds
        # One matching term suffices; all of its expressions must match; an empty term selects nothing.
        named = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]}
        assert fits({"matchExpressions": [expression]}, named)
        assert not fits({"matchExpressions": [expression, {"key": "zone", "operator": "Exists"}]})
        assert not fits({})


def job(**changes: Any) -> PseudoRealJob:
    body = good_job("llm", **({"spec__phases__1__batch": {"sequences": 64, "microBatches": 2}} | changes))
    body["metadata"]["uid"] = UID
    return PseudoRealJob.from_object(body)


LIMITS = {"limits": {GPU: 2, "cpu": 8, "memory": "64Gi"}}


class TestPodSet:
    def test_pod_set_is_that_of_the_operators_job(self) -> None:
        wanted = job(spec__phases__1__resources=LIMITS)
        delink, real = stages_left(wanted, PseudoRealJobStatus(), "real")
        pods = pod_set_of(wanted, real, PodNeeds(2 * GIB, 0, 12 * GIB))
        assert pods.count == 2
        assert pods.requests == {GPU: 2, "cpu": 8, "memory": 64 * GIB, "pods": 1}
        assert pods.device_bytes == 12 * GIB
        assert pod_set_of(wanted, delink, None).requests == {"cpu": 8, "memory": 64 * GIB, "pods": 1}

    def test_requests_below_the_estimate_are_raised_to_it(self) -> None:
        wanted = job(spec__phases__0__offload={"home": "Disk"})
        pods = pod_set_of(wanted, stages_left(wanted, PseudoRealJobStatus(), None)[0], PodNeeds(3 * GIB, 5 * GIB, 0))
        assert pods.requests == {"memory": 3 * GIB, "ephemeral-storage": 5 * GIB, "pods": 1}
        elsewhere = job(spec__phases__0__offload={"home": "Disk", "volume": {"hostPath": {"path": "/nvme"}}})
        pods = pod_set_of(
            elsewhere, stages_left(elsewhere, PseudoRealJobStatus(), None)[0], PodNeeds(3 * GIB, 5 * GIB, 0)
        )
        assert "ephemeral-storage" not in pods.requests

    def test_completed_stages_are_not_planned(self) -> None:
        status = PseudoRealJobStatus.model_validate({"phases": [{"name": "pseudo", "state": "Complete"}]})
        assert [stage.title for stage in stages_left(job(), status, None)] == [
            "the delink into phase real",
            "phase real",
        ]
        assert [stage.title for stage in stages_left(job(), status, "pseudo")] == ["phase pseudo"]

    def test_limits_below_the_estimate_are_problems(self) -> None:
        small = job(
            spec__phases__0__resources={"limits": {"memory": "1Gi"}},
            spec__phases__0__offload={"home": "Disk", "volume": {"emptyDir": {"sizeLimit": "2Gi"}}},
        )
        phase, need = small.spec.phases[0], PodNeeds(2 * GIB, 3 * GIB, 0)
        spec = pod_set_of(small, stages_left(small, PseudoRealJobStatus(), None)[0], need).spec
        memory, disk = limits_below_needs(phase, spec, need)
        assert memory.startswith("spec.phases[pseudo].resources.limits.memory is 1Gi, but a pod needs 2.00 GiB")
        assert "sizeLimit is 2Gi, but a pod needs 3.00 GiB of disk" in disk
        assert limits_below_needs(phase, spec, PodNeeds(GIB, 2 * GIB, 0)) == []


def report(wanted: PseudoRealJob, there: list[Node], need: PodNeeds) -> StageReport:
    stage = stages_left(wanted, PseudoRealJobStatus(), "real")[-1]
    pods = pod_set_of(wanted, stage, need)
    problems = limits_below_needs(wanted.spec.phases[1], pods.spec, need)
    return StageReport(stage.title, "real", pods, need, fit(there, pods), there, problems)


WANTED = job(spec__phases__1__resources=LIMITS)
NEED = PodNeeds(20 * GIB, 0, 60 * GIB)
BIG = {"labels": {"nvidia.com/gpu.memory": "81559"}}
RACK = "topology.example/rack"


def racks(*names: str, **changes: Any) -> list[Node]:
    """Return nodes a, b, ... in these racks, with room for one pod each."""
    bodies = [node_body(chr(97 + n), labels={RACK: rack}, **{GPU: "2"}) for n, rack in enumerate(names)]
    return nodes(*bodies, **changes)


def near(topology: Json, workers: int = 4) -> PseudoRealJob:
    layout = {"pipeline": 2, "stateSharding": "Full"}
    shape = {"spec__phases__1__workers": workers, "spec__phases__1__parallelism": layout}
    return job(
        **shape,
        spec__phases__1__batch={"sequences": 8},
        spec__phases__1__processesPerWorker=1,
        spec__phases__1__resources=LIMITS,
        spec__scheduling={"topology": topology},
    )


def spread(wanted: PseudoRealJob, there: list[Node]) -> StageReport:
    """Return the report, with the bytes that cross between racks and between nodes."""
    found = report(wanted, there, PodNeeds(20 * GIB, 0, 0))
    planned = plan_phase(
        phase_config(wanted, 1, execution=1, work_directory=".", offload_directory="."), "accelerator", None, 1
    )
    return replace(found, levels=traffic_levels(found.fit, found.pods.topology, planned.layout.mesh, planned.flows))


CPU_JOB = job(spec__checkpoint={}, spec__phases__1__resources={"limits": {"cpu": 8}})
"""Job with a claim that the operator makes."""

REPORTS: dict[str, StageReport] = {
    "one-node": report(CPU_JOB, nodes(node_body("a", cpu="8"), node_body("b", cpu="8")), PodNeeds(GIB, 0, 0)),
    "racks": spread(near({"preferred": RACK}), racks("x", "y", "x", "y")),
    "fits": report(WANTED, nodes(node_body("a", **BIG), node_body("b", **BIG), pods=(pod_body("a", gpu=6),)), NEED),
    "waits": report(WANTED, nodes(node_body("a", **BIG), pods=(pod_body("a", gpu=6),)), NEED),
    "few-nodes": report(job(spec__phases__1__resources=LIMITS | {"limits": {GPU: 8}}), nodes(node_body("a")), NEED),
    "large-pods": report(
        job(spec__phases__1__resources={"limits": {GPU: 16}}), nodes(node_body("a"), node_body("b")), NEED
    ),
    "small-gpus": report(
        WANTED, nodes(*(node_body(f"gpu-{i}", labels={"nvidia.com/gpu.memory": "40960"}) for i in range(6))), NEED
    ),
    "taints": report(WANTED, nodes(node_body("a", taints=[GPU_TAINT]), node_body("cpu", **{GPU: "0"})), NEED),
    "small-limit": report(WANTED, nodes(node_body("a", **BIG)), PodNeeds(80 * GIB, 0, 60 * GIB)),
    "no-nodes": report(WANTED, [], NEED),
}


@pytest.mark.parametrize("name", REPORTS)
def test_stage_report_matches_its_golden_file(name: str) -> None:
    lines = [*REPORTS[name].lines()]
    assert "\n".join(lines) + "\n" == golden(f"plan-{name}", lines)


def test_stage_report_tells_fits_now_from_fits_ever() -> None:
    assert {name: (one.can_run, one.can_run_now) for name, one in REPORTS.items()} == {
        "fits": (True, True),
        "racks": (True, True),
        "waits": (True, False),
        **dict.fromkeys(
            ("few-nodes", "large-pods", "small-gpus", "taints", "small-limit", "no-nodes", "one-node"), (False, False)
        ),
    }


class TestClaimForOneNode:
    @pytest.mark.parametrize(
        ("mode", "placement"), [("ReadWriteOnce", {}), ("ReadWriteMany", {"a": 1, "b": 1})], ids=["one", "many"]
    )
    def test_mode_of_the_claim_decides_whether_pods_fit_on_two_nodes(
        self, mode: str, placement: dict[str, int]
    ) -> None:
        stage = stages_left(WANTED, PseudoRealJobStatus(), "real")[-1]
        pods = pod_set_of(WANTED, stage, NEED, [Claim("checkpoints", modes=(mode,))])
        found = fit(nodes(node_body("a", **{GPU: "2"}), node_body("b", **{GPU: "2"})), pods)
        assert (found.placement if found.fits_now else {}) == placement

    def test_node_with_the_most_room_takes_all_pods(self) -> None:
        found = report(CPU_JOB, nodes(node_body("a", cpu="8"), node_body("b")), PodNeeds(GIB, 0, 0))
        assert found.fit.placement == {"b": 2}
        full = nodes(node_body("a", cpu="8"), node_body("b"), pods=(pod_body("b", cpu=60),))
        waits = report(CPU_JOB, full, PodNeeds(GIB, 0, 0))
        assert (waits.can_run, waits.can_run_now) == (True, False)
        says = "there is room for 1 of 2 pods on one node, where a claim keeps them, now"
        assert waits.sentences()[0].startswith(says)

    def test_affinity_of_the_user_to_other_pods_is_none_to_one_node(self) -> None:
        term = {"labelSelector": {"matchLabels": {"app": "cache"}}, "topologyKey": "kubernetes.io/hostname"}
        near = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
        assert not gpus(2, 2, affinity=near).is_on_one_node


class TestTopology:
    def test_required_topology_needs_one_rack_with_room_for_all_pods(self) -> None:
        pods = replace(gpus(2, 2), topology=Topology(required=RACK))
        assert fit(racks("x", "y", "y"), pods).placement == {"b": 1, "c": 1}
        assert fit(racks("y", "x", "y", "x"), pods).placement == {"a": 1, "c": 1}
        apart = fit(racks("x", "y"), pods)
        assert (apart.fits_now, apart.fits_ever, apart.room_ever) == (False, False, 1)
        taken = fit(racks("x", "y", "y", pods=(pod_body("b", gpu=1),)), pods)
        assert (taken.fits_now, taken.fits_ever) == (False, True)

    def test_required_topology_excludes_nodes_without_the_label(self) -> None:
        pods = replace(gpus(1, 2), topology=Topology(required=RACK))
        assert fit(nodes(node_body("a")), pods).obstacles["a"].startswith(f"no label {RACK}")
        assert fit(nodes(node_body("a")), replace(pods, topology=Topology(preferred=RACK))).fits_now

    def test_preferred_topology_fills_the_rack_with_most_room_first(self) -> None:
        pods = replace(gpus(3, 2), topology=Topology(preferred=RACK))
        assert [*fit(racks("x", "y", "y"), pods).placement.items()] == [("b", 1), ("c", 1), ("a", 1)]

    def test_delink_has_no_topology(self) -> None:
        stage = next(stage for stage in stages_left(near({"required": RACK}), PseudoRealJobStatus(), "real"))
        assert stage.kind is StageKind.DELINK
        assert pod_set_of(near({"required": RACK}), stage, None).topology is None

    def test_shard_traffic_stays_in_a_rack_and_pipeline_traffic_crosses(self) -> None:
        racks, nodes = REPORTS["racks"].levels
        assert (racks.count, nodes.count) == (2, 4)
        assert {exchange for exchange, size in racks.bytes.items() if size} == {"pipeline"}
        assert {exchange for exchange, size in nodes.bytes.items() if size} == {"pipeline", "shards"}
        assert REPORTS["racks"].as_json()["levels"][0]["bytes_per_step"] == racks.bytes


def test_json_has_the_content_of_the_lines() -> None:
    said = REPORTS["waits"].as_json()
    assert (said["fits"], said["fits_now"], said["pods"], said["requests"][GPU]) == (True, False, 2, 2.0)
    assert said["reasons"][0].startswith("there is room for 1 of 2 pods now")

"""Which resources and claims of a pod are accelerators, and how many it asks for."""

from typing import Any

import pytest
from pseudoreal_api.resolved.accelerators import is_accelerator
from pseudoreal_api.resolved.check import check_resolvable
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.resolved.resolve import UnresolvableJob, phase_config
from pseudoreal_api.spec.check import check_job

from tests.support.jobs import good_job

BATCH = {"sequences": 64}


def _config(**changes: Any) -> PhaseConfig:
    changes = {"spec__phases__1__batch": BATCH, **changes}
    return phase_config(check_job(good_job(**changes)), 1, execution=3, work_directory="/w", offload_directory="/o")


def _template(**resources: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "trainer", "resources": resources}]}}


ACCELERATORS = [
    "nvidia.com/gpu",
    "nvidia.com/gpu.shared",
    "nvidia.com/gpu-h100",
    "nvidia.com/mig-1g.10gb",
    "nvidia.com/mig-3g.40gb.me",
    "nvidia.com/mig-1g.10gb.shared",
    "amd.com/gpu",
    "amd.com/cpx_nps4",
    "habana.ai/gaudi",
    "gpu.intel.com/i915",
    "gpu.intel.com/xe",
    "huawei.com/Ascend910",
    "huawei.com/Ascend910B3",
    "huawei.com/Ascend910-16c",
    "huawei.com/npu",
    "metax-tech.com/gpu",
]
OTHERS = [
    "cpu",
    "memory",
    "hugepages-1Gi",
    "gpu",
    "nvidia.com/hostdev",
    "nvidia.com/gpumem",
    "nvidia.com/gpucores",
    "nvidia.com/mig-",
    "nvidia.com/gpu.",
    "gpu.intel.com/millicores",
    "gpu.intel.com/memory.max",
    "gpu.intel.com/tiles",
    "gpu.intel.com/xe_monitoring",
    "huawei.com/Ascend910B4-memory",
    "rdma/hca_shared_devices_a",
    "example.com/gpus",
    "requests.nvidia.com/gpu\n",
]


@pytest.mark.parametrize("name", ACCELERATORS)
def test_a_rank_is_made_for_each_accelerator_of_any_vendor(name: str) -> None:
    found = _config(spec__phases__1__resources={"limits": {name: 2, "memory": "8Gi"}})
    assert (found.gpus, found.processes_per_worker) == (2, 2)


@pytest.mark.parametrize("name", OTHERS)
def test_other_resources_are_no_accelerators(name: str) -> None:
    assert not is_accelerator(name)


def test_accelerators_of_several_kinds_add_up() -> None:
    assert _config(spec__phases__1__resources={"limits": {"nvidia.com/gpu": 1, "nvidia.com/mig-1g.10gb": 2}}).gpus == 3


def test_accelerators_of_the_pod_template_count_and_the_phase_s_own_come_last() -> None:
    """The template is laid over the resources of the phase, and the phase's template over the job's."""
    job = {"spec__pod": {"template": _template(limits={"amd.com/gpu": 4})}}
    assert _config(**job).gpus == 4
    assert _config(**job, spec__phases__1__resources={"limits": {"amd.com/gpu": 8}}).gpus == 4
    assert _config(**job, spec__phases__1__pod={"template": _template(limits={"amd.com/gpu": 2})}).gpus == 2
    sidecar = {"spec": {"containers": [{"name": "other", "resources": {"limits": {"amd.com/gpu": 4}}}]}}
    assert _config(spec__pod={"template": sidecar}).gpus == 0, "it is not the trainer that gets them"


def test_a_claim_counts_as_one_accelerator_unless_the_job_says_how_many_ranks() -> None:
    claims = _template(claims=[{"name": "gpus", "request": "first"}, {"name": "gpus", "request": "second"}])
    pod = {"spec__pod": {"template": claims}}
    found = _config(**pod)
    assert (found.gpus, found.processes_per_worker) == (2, 2)
    found = _config(**pod, spec__phases__1__processesPerWorker=8)
    assert (found.gpus, found.processes_per_worker) == (8, 8)


def test_a_claim_beside_a_named_accelerator_is_another_device() -> None:
    """A network adapter, for instance."""
    pod = {"spec__pod": {"template": _template(claims=[{"name": "adapters"}])}}
    assert _config(**pod, spec__phases__1__resources={"limits": {"nvidia.com/gpu": 4}}).gpus == 4


def test_claims_of_the_pod_alone_reach_no_container() -> None:
    template = {"spec": {"resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "gpus"}]}}
    assert _config(spec__pod={"template": template}).gpus == 0


@pytest.mark.parametrize(
    ("amount", "says"),
    [
        ("500m", "500m is not a whole number; write 1, 2"),
        ("65", "65 accelerators in a pod are more than 64; take more workers"),
        ("9E", "9000000000000000000 accelerators in a pod are more than 64"),
        ("1e99", "accelerators in a pod are more than 64"),
    ],
)
def test_an_amount_that_is_no_number_of_devices_is_refused_with_a_sentence(amount: str, says: str) -> None:
    spec = check_job(good_job(spec__phases__1__resources={"limits": {"nvidia.com/mig-1g.10gb": amount}})).spec
    with pytest.raises(UnresolvableJob, match=rf"spec.phases\[real\].resources.limits: .*{says}"):
        check_resolvable(spec)


@pytest.mark.parametrize("amount", ["1/0", "", "-1", "1" * 100, "eight", [8], {"a": 1}])
def test_an_amount_of_a_template_that_is_no_quantity_is_refused_with_a_sentence(amount: Any) -> None:
    """The API server checks templates less strictly than resources of phases."""
    job = check_job(good_job())
    template = _template(limits={"nvidia.com/gpu": amount})
    spec = job.spec.model_copy(update={"pod": job.spec.pod.model_copy(update={"template": template})})
    with pytest.raises(UnresolvableJob, match=r"of nvidia.com/gpu, .* is not a quantity; write 1, 2 and so on"):
        check_resolvable(spec)


@pytest.mark.parametrize(
    "template",
    [
        {"spec": None},
        {"spec": {"containers": None}},
        {"spec": {"containers": ["trainer", {"name": "trainer", "resources": None}]}},
        _template(limits=None, claims=None),
        _template(limits={"nvidia.com/gpu": None}, claims=["gpus"]),
    ],
)
def test_a_template_with_holes_asks_for_nothing(template: dict[str, Any]) -> None:
    job = check_job(good_job())
    spec = job.spec.model_copy(update={"pod": job.spec.pod.model_copy(update={"template": template})})
    changed = job.model_copy(update={"spec": spec})
    assert phase_config(changed, 1, execution=3, work_directory="/w", offload_directory="/o").gpus == 0

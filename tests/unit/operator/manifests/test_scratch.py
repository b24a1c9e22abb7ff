"""The bound on what a pod writes to its node's disk leaves room for all that the trainer's own plan puts there."""

from typing import Any

import pytest
from pseudoreal_api.quantity import bytes_of
from pseudoreal_api.resolved.resolve import phase_config
from pseudoreal_operator.manifests.scratch import size_limit
from pseudoreal_trainer.forecast.memory.from_config import best_layout, phase_sizes
from pseudoreal_trainer.forecast.memory.memory import held

from tests.unit.operator.world import make_job

LARGE = {"layers": 8, "hidden": 1024, "heads": 8, "sequence": 32, "ffn": {"hidden": 4096}}
OFFLOAD = {"spec__phases__1__offload": {"home": "disk"}}


@pytest.mark.parametrize("compute", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"spec__model__ffn": {"hidden": 4096, "activation": "swiglu"}},
        {"spec__model__moe": {"experts": 4}},
        {"spec__phases__1__sharing": {"blocks": 4}},
        {"spec__phases__1__parallelism": {"pipeline": 2}},
        {"spec__phases__1__parallelism": {"stateSharding": "full"}},
        {"spec__phases__1__processesPerWorker": 2, "spec__phases__1__parallelism": {"pipeline": 4}},
        {"spec__phases__1__offload": {"budget": {"device": "64Mi", "host": "1Mi"}}},
    ],
    ids=str,
)
def test_it_is_at_least_what_the_plan_needs_and_not_much_more(changes: dict[str, Any], compute: str) -> None:
    job = make_job(spec__model=LARGE, spec__precision={"compute": compute}, **OFFLOAD | changes)
    config = phase_config(job, 1, attempt=1, work_directory="/w", offload_directory="/o")
    layout, sizes = best_layout(config, "cpu"), phase_sizes(config, "cpu")
    ranks = config.processes_per_worker
    needed = ranks * max(held(layout, sizes, rank).disk for rank in range(layout.pipeline))
    allowed = bytes_of(size_limit(job.spec, job.spec.phases[1]))
    assert 2 * needed <= allowed
    assert "budget" in str(changes) or allowed <= 5 * needed + 2 * 2**30

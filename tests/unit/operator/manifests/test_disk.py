"""The size limit of a pod's disk leaves room for everything that the trainer's own plan puts there."""

from typing import Any

import pytest
from pseudoreal_api.quantity import bytes_of
from pseudoreal_api.resolved.resolve import phase_config
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_operator.manifests.disk import claim_size, size_limit
from pseudoreal_trainer.plan.memory.from_config import fixed_layout, phase_sizes, placed_layout
from pseudoreal_trainer.plan.memory.homes import activation_peaks
from pseudoreal_trainer.plan.memory.tiers import resident_bytes
from pseudoreal_trainer.plan.units import units_of

from tests.unit.operator.support.world import make_job

LARGE = {
    "layers": 8,
    "hiddenSize": 1024,
    "attention": {"heads": 8},
    "sequenceLength": 32,
    "feedForward": {"size": 4096},
}
OFFLOAD = {"spec__phases__1__offload": {"home": "Disk"}}


@pytest.mark.parametrize("compute", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"spec__model__feedForward": {"size": 4096, "activation": "SwiGLU"}},
        {"spec__model__experts": {"count": 4}},
        {
            "spec__model__experts": {"count": 4, "denseLayers": [1, 5]},
            "spec__phases__1__sharing": {"blocks": 4, "parts": ["Experts"]},
        },
        {"spec__model__vocabularySize": 50_000},
        {"spec__model__vocabularySize": 50_000, "spec__model__embeddings": "Tied"},
        {"spec__phases__1__sharing": {"blocks": 4}},
        {"spec__phases__1__parallelism": {"pipeline": 2}},
        {"spec__phases__1__parallelism": {"stateSharding": "None"}},
        {"spec__phases__1__processesPerWorker": 2, "spec__phases__1__parallelism": {"pipeline": 4}},
        {"spec__phases__1__offload": {"budget": {"device": "64Mi", "host": "1Mi"}}},
    ],
    ids=str,
)
def test_size_limit_is_just_above_the_planned_bytes(changes: dict[str, Any], compute: str) -> None:
    job = make_job(spec__model=LARGE, spec__precision={"compute": compute}, **OFFLOAD | changes)
    config = phase_config(job, 1, execution=1, work_directory="/w", offload_directory="/o")
    sizes = phase_sizes(config, "cpu")
    layout = placed_layout(config, sizes, activation_peaks(fixed_layout(config, sizes), sizes))
    ranks = config.processes_per_worker
    needed = ranks * max(resident_bytes(layout, sizes, rank).disk for rank in range(layout.pipeline))
    allowed = bytes_of(size_limit(job.spec, job.spec.phases[1]))
    assert 2 * needed <= allowed
    assert "budget" in str(changes) or allowed <= 5 * needed + 2 * 2**30


def test_size_limit_of_a_shallow_phase_is_that_of_a_model_of_its_depth() -> None:
    deep = {"name": "deep", "until": {"step": 20}, "batch": {"sequences": 8}}
    shallow = deep | {"name": "shallow", "layers": 2, "until": {"step": 10}, "offload": {"home": "Disk"}}
    grown, alone = (
        make_job(spec__model=LARGE | {"layers": layers}, spec__phases=[shallow, *rest])
        for layers, rest in ((8, [deep]), (2, []))
    )
    assert size_limit(grown.spec, grown.spec.phases[0]) == size_limit(alone.spec, alone.spec.phases[0])


def test_size_limit_of_a_layout_to_be_chosen_is_that_of_the_largest_state() -> None:
    limits = [
        size_limit(job.spec, job.spec.phases[1])
        for layout in ({"layout": "Auto"}, {"stateSharding": "None"}, {})
        for job in [
            make_job(
                spec__model=LARGE,
                spec__phases__1__parallelism=layout,
                spec__phases__1__batch={"sequences": 8},
                **OFFLOAD,
            )
        ]
    ]
    assert limits[0] == limits[1]
    assert bytes_of(limits[2]) < bytes_of(limits[0])


@pytest.mark.parametrize("compute", ["bfloat16", "float64"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"spec__model__experts": {"count": 4}},
        {"spec__model__attention": {"heads": 8, "keyValueHeads": 2, "headSize": 64, "bias": "All"}},
        {"spec__model__family": "OLMo2", "spec__model__feedForward": {"size": 64, "bias": "All"}},
        {"spec__model__family": "Qwen3", "spec__model__norm": {"placement": "Both"}},
        {"spec__model__experts": {"count": 4, "denseLayers": [0, 2, 4, 6]}},
        {"spec__model__experts": {"type": "TopK", "count": 4, "topK": {"perToken": 2, "size": 96, "sharedExperts": 2}}},
        {"spec__model__vocabularySize": 50_000},
        {"spec__phases__0__layers": 4},
        {"spec__checkpoint__keepLast": 10},
        {"spec__checkpoint__keepEvery": 4},
        {"spec__checkpoint__keepEvery": 20},
    ],
    ids=str,
)
def test_claim_has_room_for_twice_the_kept_checkpoints(changes: dict[str, Any], compute: str) -> None:
    """The need is summed independently: the trainer's own units, at each step whose checkpoint is kept."""
    job = make_job(spec__model=LARGE, spec__precision={"compute": compute}, **changes)
    word, ends, kept = (8 if compute == "float64" else 4), [10, 20], job.spec.checkpoint
    sizes = []
    for phase in job.spec.phases:
        model = job.spec.model.model_copy(update={"layers": phase.layers or 8})
        blocks = phase.sharing.blocks if phase.sharing else 8
        sizes.append(sum(3 * word * unit.numel for unit in units_of(model, Sharing(blocks=blocks))))
    steps = [step for step in range(1, 21) if kept.keep_every and step % kept.keep_every == 0]
    needed = sum(sizes) + (kept.keep_last + 1) * max(sizes) + sum(sizes[step > ends[0]] for step in steps)
    assert 2 * needed <= bytes_of(claim_size(job.spec)) <= 2 * needed + 2**30 + 2**20

"""From the spec to the configuration of each phase."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pseudoreal_api.resolved.check import check_resolvable
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.resolved.elastic import resized
from pseudoreal_api.resolved.resolve import (
    UnresolvableJob,
    delink_config,
    growth_text,
    has_some_layout,
    last_steps,
    model_of,
    phase_config,
)
from pseudoreal_api.spec.check import check_job
from pseudoreal_api.spec.optimizer import Optimizer
from pseudoreal_api.spec.phase import Growth, Phase, Sharing
from pseudoreal_api.wire.contract import with_contract
from pseudoreal_trainer.plan.sizes import fills_blocks
from pseudoreal_trainer.plan.units import units_of

from tests.support.depth import DEPTH
from tests.support.jobs import good_job

EVEN = st.sampled_from([48, 96, 128, 1440, 4096])
"""Sequence lengths with many numbers of context ranks."""
GPUS = {"limits": {"nvidia.com/gpu": 8}}
OBJECTS = {"type": "ObjectStorage", "objectStorage": {"url": "s3://bucket/prefix"}}

TOKENS = {
    "path": "tokens",
    "sources": [{"name": "web", "weight": 7}, {"name": "code"}],
    "validation": {"sets": [{"name": "wiki"}]},
}

SLICED: dict[str, Any] = {"spec__phases__1__workers": 8, "spec__phases__1__parallelism": {"tensorRanks": 4}}
TOP_K = {"type": "TopK", "count": 4, "topK": {"perToken": 2, "sharedExperts": 1, "size": 6}}
OBSTACLES_TO_TENSOR_RANKS: list[tuple[dict[str, Any], str]] = [
    ({"spec__model__attention": {"heads": 2}}, r"tensorRanks 4 must divide spec.model.attention.heads, and it is 2"),
    (
        {"spec__model__feedForward": {"size": 66}},
        r"tensorRanks 4 must divide spec.model.feedForward.size, and it is 66",
    ),
    ({"spec__model__experts": TOP_K}, r"must divide the intermediate size of the shared experts, and it is 6"),
    (
        {"spec__model__attention": {"heads": 24, "keyValueHeads": 6, "headSize": 4}},
        r"must divide spec.model.attention.keyValueHeads 6 or be a multiple of it",
    ),
    ({"spec__model__sequenceLength": 12}, r"times contextRanks 1 cuts each sequence into 8 equal chunks.* 12 has no"),
    (
        {"spec__phases__1__parallelism": {"tensorRanks": 4, "contextRanks": 2}, "spec__model__sequenceLength": 24},
        r"times contextRanks 2 cuts each sequence into 16 equal chunks",
    ),
    ({"spec__model__attention": {"heads": 4, "queryKeyNorm": "AllHeads"}}, r"queryKeyNorm AllHeads needs all heads"),
    ({"spec__model__experts": {"count": 4}}, r"spec.model.experts counts the tokens of whole sequences"),
    ({"spec__optimizer": {"algorithm": "Muon"}}, r"spec.optimizer.algorithm Muon needs whole ones"),
    ({"spec__optimizer": {"moments": "BFloat16"}}, r"needs spec.optimizer.moments Master, and it is BFloat16"),
    ({"spec__precision": {"products": "Float8"}}, r"needs spec.precision.products Compute, and it is Float8"),
    ({"spec__phases__1__activations": {"sequenceChunks": 2}}, r"needs activations.sequenceChunks 1, and it is 2"),
    (
        {
            "spec__phases__1__sharing": {"blocks": 4},
            "spec__phases__1__until": {"step": 20, "gradientCorrelation": {"below": "0.5"}},
        },
        r"until.gradientCorrelation and delink.optimizerState Measured compare whole",
    ),
    (
        {"spec__phases__1__workers": 6, "spec__phases__1__batch": {"sequences": 12}},
        r"a replica has 6 data-parallel ranks, not a multiple of parallelism.tensorRanks 4",
    ),
    (
        {
            "spec__phases__1__workers": 6,
            "spec__phases__1__parallelism": {"tensorRanks": 2, "contextRanks": 2},
        },
        r"contextRanks 2 times tensorRanks 2 ranks share each sequence, and a replica has 6",
    ),
]
MEASURED = {"spec__delink": {"optimizerState": "Measured"}}


def _resolve(**changes: Any) -> PhaseConfig:
    return phase_config(check_job(good_job(**changes)), 1, execution=3, work_directory="/w", offload_directory="/o")


def test_processes_default_to_the_gpus_of_a_pod() -> None:
    assert _resolve().ranks == 2
    assert _resolve(spec__phases__1__resources=GPUS, spec__phases__1__batch={"sequences": 32}).ranks == 16


@pytest.mark.parametrize("count", ["8", "8.0", "8e0", "8000m"])
def test_gpus_may_be_written_as_any_quantity(count: str) -> None:
    limits = {"limits": {"nvidia.com/gpu": count}}
    assert _resolve(spec__phases__1__resources=limits, spec__phases__1__batch={"sequences": 32}).ranks == 16


def test_a_part_of_a_gpu_is_refused_with_a_sentence() -> None:
    spec = check_job(good_job(spec__phases__1__resources={"limits": {"nvidia.com/gpu": "500m"}})).spec
    says = r"phases\[real\].resources.limits: of nvidia.com/gpu, 500m is not a whole number; write 1, 2"
    with pytest.raises(UnresolvableJob, match=says):
        check_resolvable(spec)


@pytest.mark.parametrize(
    ("changes", "sharding"),
    [
        ({}, "Full"),
        ({"workers": 1}, "None"),
        ({"workers": 1, "processesPerWorker": 2}, "Full"),
        ({"workers": 1, "resources": GPUS, "batch": {"sequences": 32}}, "Full"),
        ({"parallelism": {"pipeline": 2}}, "None"),
        ({"parallelism": {"pipeline": "AllRanks"}}, "None"),
        ({"workers": 4, "parallelism": {"pipeline": 2}}, "Full"),
        ({"workers": 4, "parallelism": {"replicas": 2}}, "Full"),
        ({"spares": 1}, "Full"),
        ({"workers": 1, "parallelism": {"stateSharding": "Optimizer"}}, "Optimizer"),
        # As the API server stored it in jobs of releases up to 0.3.0, in which None was the default.
        ({"parallelism": {"stateSharding": "None"}}, "None"),
        # The trainer chooses, and searches all modes.
        ({"parallelism": {"layout": "Auto"}, "batch": {"sequences": 8}}, "None"),
        ({"parallelism": {"layout": "Auto", "stateSharding": "None"}, "batch": {"sequences": 8}}, "None"),
    ],
    ids=str,
)
def test_omitted_state_sharding_is_full_from_two_data_ranks_on(changes: dict[str, Any], sharding: str) -> None:
    set_fields = {f"spec__phases__1__{field}": value for field, value in changes.items()}
    assert _resolve(**set_fields).parallelism.state_sharding == sharding


def test_omitted_state_sharding_keeps_matrices_whole_for_muon() -> None:
    assert _resolve(spec__optimizer__algorithm="Muon").parallelism.state_sharding == "None"


@pytest.mark.parametrize(("workers", "sharding"), [(4, "Full"), (2, "Full"), (1, "None")])
def test_omitted_state_sharding_follows_the_width_of_an_elastic_phase(workers: int, sharding: str) -> None:
    elastic = {"spec__phases__1__workers": 4, "spec__phases__1__elastic": {"minWorkers": 1}}
    job = check_job(good_job(**elastic, spec__phases__1__batch={"sequences": 8}))
    job = job.model_copy(update={"spec": resized(job.spec, 1, workers)})
    found = phase_config(job, 1, execution=1, work_directory="/w", offload_directory="/o")
    assert found.parallelism.state_sharding == sharding


def test_omitted_sharing_becomes_one_block_for_each_layer() -> None:
    assert _resolve().sharing.blocks == 8


def test_a_layout_that_is_chosen_later_is_left_open() -> None:
    auto = {"layout": "Auto", "hardware": "/profiles/hardware.yaml"}
    found = _resolve(spec__phases__1__parallelism=auto, spec__phases__1__batch={"sequences": 8})
    assert (found.parallelism.layout, found.parallelism.hardware) == ("Auto", "/profiles/hardware.yaml")


@pytest.mark.parametrize(
    ("workers", "length", "fits"), [(16, 32, True), (64, 31, True), (80, 31, False), (80, 32, True), (67, 32, False)]
)
def test_a_layout_is_chosen_only_where_there_is_one(workers: int, length: int, fits: bool) -> None:
    """8 layers and 8 sequences occupy at most 64 ranks, or 128 if each sequence is cut over two ranks. A sequence of 31
    tokens cannot be cut, and 67 ranks have no divisor."""
    shape = {"spec__phases__1__workers": workers, "spec__phases__1__batch": {"sequences": 8}}
    shape["spec__model__sequenceLength"] = length
    spec = check_job(good_job(spec__phases__1__parallelism={"layout": "Auto"}, **shape)).spec
    if fits:
        check_resolvable(spec)
        return
    with pytest.raises(UnresolvableJob, match=f"{workers} ranks are at least .* data-parallel ranks"):
        check_resolvable(spec)


@settings(max_examples=DEPTH.of(200, 10_000), derandomize=not DEPTH.is_deep)
@given(
    ranks=st.integers(1, 400), layers=st.integers(1, 30), sequences=st.integers(1, 40), length=st.integers(2, 40) | EVEN
)
def test_some_layout_is_one_that_trying_finds(ranks: int, layers: int, sequences: int, length: int) -> None:
    spec = check_job(good_job(spec__phases__1__batch={"sequences": sequences})).spec
    spec = spec.model_copy(
        update={"model": spec.model.model_copy(update={"layers": layers, "sequence_length": length})}
    )
    tried = (
        ranks // (context * pipeline) <= sequences
        for pipeline in range(1, layers + 1)
        for context in range(1, ranks + 1)
        if ranks % (context * pipeline) == 0 and (context == 1 or length % (2 * context) == 0)
    )
    assert has_some_layout(spec, spec.phases[1], ranks) == any(tried)


def test_a_pipeline_of_all_ranks() -> None:
    assert _resolve(spec__phases__1__parallelism={"pipeline": "AllRanks"}).parallelism.pipeline == 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"spec__phases__1__parallelism": {"pipeline": "AllRanks"}, "spec__phases__1__resources": GPUS},
            r"workers 2 x 8 processes per worker = 16 ranks, more than spec.model.layers 8; lower workers",
        ),
        ({"spec__phases__1__parallelism": {"pipeline": 3}}, r"= 2 ranks, not a multiple of parallelism.pipeline 3"),
        (
            {
                "spec__phases__1__workers": 4,
                "spec__phases__1__parallelism": {"replicas": 3, "stateSharding": "Full"},
            },
            r"4 data-parallel ranks, not a multiple of parallelism.replicas 3; change one of them",
        ),
        (
            {
                "spec__phases__1__workers": 4,
                "spec__phases__1__parallelism": {"replicas": 2, "stateSharding": "Full", "expertRanks": 4},
                "spec__model__experts": {"count": 8},
            },
            r"a replica has 2 data-parallel ranks, not a multiple of parallelism.expertRanks 4; change workers",
        ),
        (
            {
                "spec__phases__1__workers": 4,
                "spec__phases__1__parallelism": {"replicas": 2, "stateSharding": "Full", "contextRanks": 4},
            },
            r"a replica has 2 data-parallel ranks, not a multiple of parallelism.contextRanks 4; change workers",
        ),
        *((SLICED | changes, message) for changes, message in OBSTACLES_TO_TENSOR_RANKS),
        (
            {
                "spec__phases__1__workers": 8,
                "spec__phases__1__batch": {"sequences": 3},
                "spec__phases__1__parallelism": {"contextRanks": 2},
            },
            r"8 data-parallel ranks in 4 groups, one for each sequence, but a micro-batch has 3 sequences",
        ),
        (
            {
                "spec__phases__1__parallelism": {"expertRanks": 2},
                "spec__model__experts": {"count": 8},
                "spec__model__norm": {"placement": "Both"},
            },
            r"expertRanks 2 needs spec.model.norm.placement Pre, and it is Both",
        ),
        (
            {
                "spec__phases__1__offload": {"expertGroups": 2},
                "spec__model__experts": {"count": 8},
                "spec__model__norm": {"placement": "Both"},
            },
            r"offload.expertGroups 2 needs spec.model.norm.placement Pre, and it is Both.*; remove expertGroups",
        ),
        (
            {
                "spec__phases__1__parallelism": {"layout": "Auto"},
                "spec__phases__1__batch": {"sequences": 8},
                "spec__phases__1__offload": {"expertGroups": 2},
                "spec__model__experts": {"count": 8},
                "spec__model__norm": {"placement": "Both"},
            },
            r"offload.expertGroups 2 needs spec.model.norm.placement Pre, and it is Both",
        ),
        (
            {
                "spec__optimizer__algorithm": "Muon",
                "spec__phases__1__parallelism": {"stateSharding": "Optimizer"},
            },
            r"phases\[real\].parallelism.stateSharding Optimizer cuts matrices over 2 data-parallel ranks, but"
            r" spec.optimizer.algorithm Muon needs whole matrices; set stateSharding None, or algorithm AdamW",
        ),
        (
            {
                "spec__optimizer__algorithm": "Muon",
                "spec__phases__1__sharing": {"blocks": 2},
                "spec__phases__1__parallelism": {"pipeline": 2, "schedule": "GPipe"},
            },
            r"phases\[real\].parallelism.pipeline 2 puts layers with shared weights on several pipeline ranks, which"
            r" cut the state .* Muon needs whole matrices; set pipeline 1, or algorithm AdamW",
        ),
        (
            {
                "spec__optimizer__algorithm": "Muon",
                "spec__phases__1__sharing": {"blocks": 2},
                "spec__phases__1__workers": 4,
                "spec__phases__1__parallelism": {"pipeline": "AllRanks"},
                "spec__phases__1__elastic": {"minWorkers": 2},
            },
            r"phases\[real\].parallelism.pipeline AllRanks changes the number of pipeline ranks with the workers of an"
            r" elastic phase, .* Muon needs whole matrices; set pipeline 1, remove elastic, or set algorithm AdamW",
        ),
        (
            {
                "spec__optimizer__algorithm": "Muon",
                "spec__phases__1__sharing": {"blocks": 2},
                "spec__phases__1__workers": 4,
                "spec__phases__1__parallelism": {"layout": "Auto"},
                "spec__phases__1__batch": {"sequences": 2},
            },
            r"phases\[real\].parallelism.layout Auto: with 4 ranks for the 2 sequences of a step, there are several"
            r" pipeline ranks, .* Muon needs whole matrices; raise batch.sequences to 4, lower workers, or set algo",
        ),
        ({"spec__phases__1__workers": 5}, r"5 data-parallel ranks, but a micro-batch has 4 sequences"),
        (
            {
                "spec__phases__1__parallelism": {"pipeline": "AllRanks", "schedule": "Interleaved"},
                "spec__phases__1__workers": 3,
            },
            r"Interleaved on 3 pipeline ranks needs a number of layers that is a multiple of 3, but the phase has 8",
        ),
        (
            {
                "spec__phases__1__parallelism": {"pipeline": "AllRanks", "schedule": "Interleaved"},
                "spec__phases__1__batch": {"sequences": 7, "microBatches": 7},
            },
            r"in 3 equal rounds, but batch.microBatches is 7; set it to a multiple of 2, or below 4",
        ),
        (
            {"spec__phases__0__offload": {"homes": [{"unit": "blocks.2", "home": "Host"}]}},
            r"phases\[pseudo\].offload.homes: there is no blocks.2, as the phase has 2 blocks; the last is blocks.1",
        ),
        (
            {"spec__data": TOKENS, "spec__phases__1__mixture": [{"source": "books", "weight": 1}]},
            r"phases\[real\].mixture: there is no source books in spec.data.sources, which has web, code",
        ),
        (
            {
                "spec__model__embeddings": "Tied",
                "spec__phases__0__offload": {"homes": [{"unit": "head", "home": "Host"}]},
            },
            r"phases\[pseudo\].offload.homes: there is no unit head, because spec.model.embeddings is Tied; name the",
        ),
    ],
)
def test_job_that_cannot_run_is_refused_with_the_necessary_change(changes: dict[str, Any], says: str) -> None:
    spec = check_job(good_job(**changes)).spec
    with pytest.raises(UnresolvableJob, match=says):
        check_resolvable(spec)


@pytest.mark.parametrize(
    "changes",
    [
        {"stateSharding": "Full", "pipeline": 2},
        {"pipeline": 2},
        {"layout": "Auto"},
    ],
    ids=str,
)
def test_muon_runs_where_no_matrix_is_cut(changes: dict[str, Any]) -> None:
    """With one data-parallel rank, stateSharding splits nothing. In the schedule Layered, layers that share a block in
    a cycle are on one pipeline rank."""
    sharing = {"spec__phases__1__sharing": {"blocks": 2}}
    spec = check_job(
        good_job(
            spec__optimizer__algorithm="Muon",
            spec__phases__1__parallelism=changes,
            spec__phases__1__batch={"sequences": 8},
            **sharing,
        )
    ).spec
    check_resolvable(spec)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 6, 8])
def test_interleaved_rounds_that_are_equal(micro_batches: int) -> None:
    _resolve(
        spec__phases__1__parallelism={"pipeline": "AllRanks", "schedule": "Interleaved"},
        spec__phases__1__batch={"sequences": 24, "microBatches": micro_batches},
    )


def test_the_homes_of_existing_units_pass() -> None:
    homes = [{"unit": unit, "home": "Host"} for unit in ("embedding", "blocks.0", "blocks.1", "head")]
    check_resolvable(check_job(good_job(spec__phases__0__offload={"homes": homes})).spec)


def test_mixtures_reach_the_trainer_with_the_phases_behind() -> None:
    changes = {"spec__data": TOKENS, "spec__phases__1__mixture": [{"source": "code", "weight": 5}]}
    job = check_job(good_job(**changes))
    first, second = (
        phase_config(job, index, execution=1, work_directory="/w", offload_directory="/o").mixtures for index in (0, 1)
    )
    assert [(mixture.weights, mixture.last_step, mixture.sequences) for mixture in first] == [
        ({"web": 7, "code": 1}, 10, 8),
        ({"code": 5}, 20, 8),
    ]
    assert second == first[1:]


def test_experts_reach_the_trainer() -> None:
    experts = {"count": 6, "prototypes": 3, "capacityFactor": "1.5"}
    job = check_job(good_job(spec__model__experts=experts))
    check_resolvable(job.spec)
    found = phase_config(job, 1, execution=1, work_directory="/w", offload_directory="/o").model.experts
    assert found is not None
    assert (found.count, found.prototypes, found.capacity_factor) == (6, 3, "1.5")


def test_tokens_and_steps_count_over_all_phases() -> None:
    spec = check_job(
        good_job(spec__phases__0__until={"tokens": 2560, "step": 99}, spec__phases__1__until={"tokens": 5121})
    ).spec
    # 8 sequences of 32 tokens are 256 tokens per step: 10 steps, then 2561 more tokens in 11 steps.
    assert last_steps(spec) == [10, 21]


def test_checkpoints_are_in_the_work_directory_or_in_object_storage() -> None:
    assert _resolve().storage == "/w"
    config = _resolve(metadata__uid="0123456789", spec__checkpoint={"storage": OBJECTS})
    assert (config.storage, config.work_directory) == ("s3://bucket/prefix/good-01234567", "/w")


def test_configurations_survive_json() -> None:
    config = _resolve()
    assert PhaseConfig.model_validate_json(config.to_json()) == config
    delink = delink_config(check_job(good_job()), 1, execution=1, work_directory="/w")
    assert (delink.to_sharing.blocks, delink.from_phase) == (8, "pseudo")


def test_a_collective_may_wait_longer_than_the_clocks_of_hang() -> None:
    """So the operator, which can name the stuck rank, acts before the collective times out; torch's default of ten
    minutes would be too early."""
    hang = {"startSeconds": 1000, "stepSeconds": 900, "checkpointSeconds": 1800}
    assert _resolve(spec__hang=hang).collective_seconds == 900 + 1800 + 300
    assert _resolve(spec__hang=hang | {"startSeconds": 7000}).collective_seconds == 7300


def test_ranks_know_how_many_gpus_their_pod_asked_for() -> None:
    assert _resolve().gpus == 0
    assert _resolve(spec__phases__1__resources=GPUS, spec__phases__1__batch={"sequences": 32}).gpus == 8


BATCH = {"sequences": 8}
SHALLOW = {"name": "shallow", "layers": 4, "until": {"step": 5}, "batch": BATCH}
HALVES = {"sharing": {"blocks": 2}}
DEEP = {"name": "deep", "until": {"step": 20}, "batch": BATCH}


def test_phase_has_its_own_layers() -> None:
    """With it goes what the model says of single layers, and every check of the phase."""
    model = {"attention": {"heads": 4, "window": {"size": 16, "layers": [1, 6]}}}
    model |= {"experts": {"count": 4, "denseLayers": [0, 4]}}
    changes = {f"spec__model__{name}": value for name, value in model.items()}
    job = check_job(good_job(**changes, spec__phases=[SHALLOW | {"layers": 1}, DEEP]))
    with pytest.raises(
        UnresolvableJob,
        match=r"growth with pattern Stack, from 1 to 8 layers: layer 1 with experts would start from layer 0 without",
    ):
        check_resolvable(job.spec)
    job = check_job(good_job(**changes, spec__phases=[SHALLOW, DEEP]))
    check_resolvable(job.spec)
    shallow, deep = (phase_config(job, i, execution=1, work_directory="/w", offload_directory="/o") for i in (0, 1))
    assert (shallow.model.layers, deep.model) == (4, job.spec.model)
    assert shallow.sharing.blocks == 4
    assert shallow.model.attention.window is not None
    assert shallow.model.attention.window.layers == [1]
    assert shallow.model.experts is not None
    assert shallow.model.experts.dense_layers == [0]
    assert model_of(job.spec, Phase.model_validate(SHALLOW | {"layers": 1})).attention.window is None, "no layer has it"
    delink = delink_config(job, 1, execution=1, work_directory="/w")
    assert (delink.to_model, delink.growth, delink.to_sharing.blocks) == (deep.model, Growth(), 8)
    assert with_contract(delink)["contractVersion"] == 4, "an earlier trainer would delink without growing"


@pytest.mark.parametrize(
    ("phases", "says"),
    [
        ([SHALLOW | {"layers": 9}, DEEP], r"phases\[shallow\].layers 9 must be at most spec.model.layers 8; lower it"),
        ([SHALLOW, SHALLOW | {"name": "two", "layers": 2}, DEEP], r"phases\[two\].layers 2 must be at least the 4 lay"),
        ([SHALLOW | {"growth": {}}, DEEP], r"phases\[shallow\].growth: there is no phase before the first phase"),
        (
            [SHALLOW | {"layers": 8}, DEEP | {"growth": {}}],
            r"phases\[deep\].growth needs more layers than phase shallow has, but both phases have 8 layers",
        ),
        ([SHALLOW | {"sharing": {"blocks": 3}}, DEEP], r"sharing.blocks 3 must divide spec.phases\[shallow\].layers 4"),
        (
            [SHALLOW | {"workers": 8, "parallelism": {"pipeline": 8}}, DEEP],
            r"parallelism.pipeline 8 must be at most spec.phases\[shallow\].layers 4",
        ),
        (
            [SHALLOW | {"workers": 8, "parallelism": {"pipeline": "AllRanks"}}, DEEP],
            r"more than spec.phases\[shallow\].layers 4; lower workers",
        ),
        (
            [SHALLOW | {"workers": 3, "parallelism": {"pipeline": 3, "schedule": "Interleaved"}}, DEEP],
            r"Interleaved on 3 pipeline ranks needs a number of layers that is a multiple of 3, but the phase has 4",
        ),
        (
            [SHALLOW | {"until": {"step": 5, "gradientCorrelation": {"below": "0.9"}}}, DEEP],
            r"the phase has 4 blocks for spec.phases\[shallow\].layers 4; remove gradientCorrelation",
        ),
        (
            [SHALLOW | HALVES, DEEP | HALVES | {"growth": {"pattern": "Interleave"}}],
            r"phases\[deep\].growth with pattern Interleave, from 4 to 8 layers: .* layer 2 would start from block 1"
            r" of that phase, .* shares block 0 would start from block 0; change growth, sharing or layers",
        ),
        (
            [SHALLOW | HALVES, SHALLOW | {"name": "two", "sharing": {"blocks": 2, "pattern": "Segment"}}, DEEP],
            r"phases\[two\].sharing: the sharing must refine .* layer 1 would start from block 1 .*; change sharing",
        ),
        (
            [SHALLOW | HALVES, DEEP | HALVES | {"growth": {"initial": "ZeroOutput"}}],
            r"phases\[deep\].growth with pattern Stack, .* sets outputs of layer 4 to zero, but layer 4 shares block 0"
            r" with layer 0, which is not added; change growth, sharing or layers",
        ),
        (
            [
                SHALLOW | {"layers": 3, "sharing": {"blocks": 1}},
                SHALLOW | HALVES | {"name": "two", "growth": {"pattern": "Interleave", "initial": "ZeroOutput"}},
                DEEP,
            ],
            r"phases\[two\].growth with pattern Interleave, .* sets outputs of layer 1 to zero, but layer 1 shares"
            r" block 1 with layer 3, which is not added; change growth, sharing or layers",
        ),
        (
            [SHALLOW | {"offload": {"homes": [{"unit": "blocks.4", "home": "Host"}]}}, DEEP],
            r"there is no blocks.4, as the phase has 4 blocks",
        ),
    ],
)
def test_layers_that_cannot_be_are_refused_with_a_sentence(phases: Any, says: str) -> None:
    untils = [phase["until"] | {"step": 5 * number} for number, phase in enumerate(phases, 1)]
    phases = [phase | {"until": until} for phase, until in zip(phases, untils, strict=True)]
    spec = check_job(good_job(spec__phases=phases)).spec
    with pytest.raises(UnresolvableJob, match=says):
        check_resolvable(spec)


def test_dense_layers_of_a_shallow_phase_share_no_block_with_others() -> None:
    experts = {"count": 4, "denseLayers": [1, 5]}
    spec = check_job(good_job(spec__model__experts=experts, spec__phases=[SHALLOW | HALVES, DEEP])).spec
    with pytest.raises(UnresolvableJob, match=r"sharing: layer 1 of .*denseLayers shares a block with layer 3"):
        check_resolvable(spec)


def test_warmup_follows_a_growth_and_nothing_is_measured_before_it() -> None:
    """Also where the blocks stay as many."""
    delink = {"optimizerState": "Measured", "warmupSteps": 7}
    phases = [SHALLOW | HALVES, DEEP | {"sharing": {"blocks": 2}}]
    job = check_job(good_job(spec__phases=phases, spec__delink=delink))
    shallow, deep = (phase_config(job, i, execution=1, work_directory="/w", offload_directory="/o") for i in (0, 1))
    assert (shallow.measure, deep.warmup_steps) == (None, 7)


EXPERTS = {"type": "TopK", "count": 6, "topK": {"perToken": 2}}
NOISE = {"noise": "0.01"}


def test_phase_has_its_own_experts() -> None:
    phases = [SHALLOW | {"layers": 8, "experts": 3}, DEEP]
    job = check_job(
        good_job(spec__model__experts=EXPERTS, spec__phases=phases, spec__delink=NOISE | {"warmupSteps": 3})
    )
    check_resolvable(job.spec)
    few, all_ = (phase_config(job, i, execution=1, work_directory="/w", offload_directory="/o") for i in (0, 1))
    assert few.model.experts is not None
    assert few.model.experts.count == 3
    assert all_.model == job.spec.model
    assert (few.noise, all_.noise, all_.warmup_steps) == (None, "0.01", 3)
    assert growth_text(job.spec, 1) == "grown from 3 to 6 experts"
    delink = delink_config(job, 1, execution=1, work_directory="/w")
    assert delink.to_model == all_.model
    assert with_contract(all_)["needs"]["noise"] == with_contract(delink)["needs"]["toModel"] == 4
    both = check_job(good_job(spec__model__experts=EXPERTS, spec__phases=[SHALLOW | {"experts": 3}, DEEP])).spec
    assert growth_text(both, 1) == "grown from 4 to 8 layers (Stack) and from 3 to 6 experts"


@pytest.mark.parametrize(
    ("experts", "phase", "delink", "says"),
    [
        (None, {"experts": 2}, NOISE, r"phases\[shallow\].experts is 2, but spec.model has no experts; remove exp"),
        (EXPERTS, {"experts": 7}, NOISE, r"phases\[shallow\].experts 7 must be at most spec.model.experts.count 6"),
        (EXPERTS, {"experts": 1}, NOISE, r"phases\[shallow\].experts 1 must be at least .*topK.perToken 2; raise it"),
        (
            {"count": 6, "prototypes": 2},
            {"experts": 2},
            NOISE,
            r"phases\[shallow\].experts needs .*prototypes 1, but prototypes is 2",
        ),
        (
            EXPERTS,
            {"experts": 3, "workers": 2, "parallelism": {"expertRanks": 2}},
            NOISE,
            r"phases\[shallow\].experts 3 must be a multiple of parallelism.expertRanks, which is 2",
        ),
        (
            EXPERTS,
            {"experts": 3, "offload": {"expertGroups": 2}},
            NOISE,
            r"phases\[shallow\].experts 3 must be a multiple of .*expertRanks times offload.expertGroups, which is 2",
        ),
        (
            EXPERTS,
            {"experts": 3},
            {},
            r"spec.delink.noise must be greater than 0, because phase deep has 6 .* from 3 experts of phase shallow",
        ),
        (EXPERTS, {}, {"noise": "1.5"}, r"spec.delink.noise 1.5 must be at most 1"),
    ],
)
def test_experts_that_cannot_be_are_refused_with_a_sentence(
    experts: Any, phase: dict[str, Any], delink: dict[str, Any], says: str
) -> None:
    phases = [SHALLOW | phase, DEEP]
    spec = check_job(good_job(spec__model__experts=experts, spec__phases=phases, spec__delink=delink)).spec
    with pytest.raises(UnresolvableJob, match=says):
        check_resolvable(spec)


def test_no_experts_are_taken_away() -> None:
    phases = [
        SHALLOW | {"layers": 8, "experts": 4},
        DEEP | {"name": "fewer", "experts": 2, "until": {"step": 9}},
        DEEP,
    ]
    spec = check_job(good_job(spec__model__experts=EXPERTS, spec__phases=phases, spec__delink=NOISE)).spec
    with pytest.raises(UnresolvableJob, match=r"phases\[fewer\].experts 2 must be at least the 4 experts of phase sh"):
        check_resolvable(spec)


def test_blocks_of_a_shallow_phase_begin_as_layers_that_it_has() -> None:
    start = {"type": "HuggingFace", "huggingFace": {"path": "w"}, "blocks": {"type": "Listed", "layers": [0, 4]}}
    spec = check_job(good_job(spec__phases=[SHALLOW | HALVES, DEEP], spec__checkpoint={"startFrom": start})).spec
    says = r"startFrom.blocks.layers: there is no layer 4, as spec.phases\[shallow\].layers is 4 and the first layer"
    with pytest.raises(UnresolvableJob, match=says):
        check_resolvable(spec)


BIASED = {"attention": {"heads": 4, "bias": "All"}, "feedForward": {"size": 136, "bias": "All"}}
TOP_K = {"type": "TopK", "count": 4, "topK": {"perToken": 1, "size": 24}}


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({}, None),
        ({"hiddenSize": 72}, "spec.model.hiddenSize is 72"),
        ({"attention": {"heads": 4, "headSize": 18}}, None),
        ({"attention": {"heads": 4, "headSize": 18, "queryKeyNorm": "PerHead"}}, "head of spec.model.attention is 18"),
        ({"attention": {"heads": 4, "headSize": 18, "queryKeyNorm": "AllHeads"}}, "all query heads .* is 72"),
        (
            {"attention": {"heads": 4, "keyValueHeads": 2, "headSize": 12, "bias": "QueryKeyValue"}},
            "key heads .* is 24",
        ),
        ({"feedForward": {"size": 136}}, None),
        (BIASED, "spec.model.feedForward.size is 136"),
        ({"experts": TOP_K}, None),
        ({"experts": TOP_K, "feedForward": {"size": 136, "bias": "All"}}, "an expert of spec.model.experts is 24"),
    ],
)
def test_moments_in_blocks_need_tensors_that_fill_them(model: dict[str, Any], says: str | None) -> None:
    """The rule says the same as the tensors of the units."""
    body = good_job(spec__optimizer={"moments": "Float8"})
    body["spec"]["model"] |= model
    spec = check_job(body).spec
    assert all(map(fills_blocks, units_of(spec.model, Sharing(blocks=spec.model.layers)))) == (says is None)
    if says is None:
        check_resolvable(spec)
        return
    with pytest.raises(UnresolvableJob, match=rf"moments Float8 stores .*{says}; make it a multiple of 16, or set"):
        check_resolvable(spec)
    check_resolvable(spec.model_copy(update={"optimizer": Optimizer(moments="BFloat16")}))


def test_matrices_are_whole_in_the_phase_that_is_measured_and_only_there() -> None:
    """`optimizerState: Measured` compares gradients in the last steps before a delink."""
    sliced = {"workers": 2, "parallelism": {"tensorRanks": 2}}
    before, after = ({f"spec__phases__{index}__{name}": value for name, value in sliced.items()} for index in (0, 1))
    check_resolvable(check_job(good_job(**MEASURED, **after)).spec)
    with pytest.raises(UnresolvableJob, match=r"phases\[pseudo\].*delink.optimizerState Measured compare whole ones"):
        check_resolvable(check_job(good_job(**MEASURED, **before)).spec)

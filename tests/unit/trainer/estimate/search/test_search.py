"""The layout search against brute force: every layout of eight ranks, planned and simulated."""

import time
from collections.abc import Callable, Iterator
from itertools import islice, pairwise, product
from pathlib import Path
from typing import Any, get_args

import pytest
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.resolved.resolve import UnresolvableJob, phase_config, rank_counts
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.phase import Keep, Schedule, StateSharding
from pseudoreal_dev.machine import paths
from pseudoreal_trainer.estimate.report import plan_phase
from pseudoreal_trainer.estimate.search.bound import min_step_seconds
from pseudoreal_trainer.estimate.search.search import Search
from pseudoreal_trainer.estimate.search.space import Choice, choices, chosen, context_choices, tensor_choices
from pseudoreal_trainer.estimate.time.costs import MeasuredCosts
from pseudoreal_trainer.estimate.time.hardware import Collectives, HardwareProfile, read_profile
from pseudoreal_trainer.estimate.time.predict import STEPS
from pseudoreal_trainer.estimate.time.timeline import timeline
from pseudoreal_trainer.plan.lower import step_plan
from pseudoreal_trainer.plan.memory.from_config import fixed_layout, phase_layout, phase_sizes

from tests.support.cpu_time import slowness
from tests.unit.trainer.estimate.time.support.profiles import profile, transfer

PHASE = 1
GPUS: dict[str, Any] = {"flops": 1e9, "pass_seconds": 1e-6, "memory_bytes_per_second": 1e9}


def in_machines(within: HardwareProfile, between: float) -> HardwareProfile:
    """Return the profile with slower collectives between machines, in bytes per second."""
    kinds = {kind: transfer(between) for kind in ("all_gather", "reduce_scatter", "all_reduce")}
    (speeds,) = within.speeds
    groups = [*speeds.collectives, Collectives(ranks=8, **kinds)]
    return within.model_copy(update={"speeds": [speeds.model_copy(update={"collectives": groups})]})


NETWORKS: dict[str, HardwareProfile] = {
    "fast networks": profile(**GPUS),
    "a slow network": profile(
        **GPUS, all_gather=2e6, reduce_scatter=2e6, all_reduce=2e6, point_to_point=1e6, agree_seconds=1e-3
    ),
    "slow updates": profile(**GPUS, update_on_device_seconds_per_element=1e-6, all_gather=1e7, reduce_scatter=1e7),
    "two ranks in a machine": in_machines(profile(**GPUS, all_gather=1e9, point_to_point=1e7), between=3e6),
    "eight ranks on four cores": profile(
        **GPUS, overlaps=False, ranks=4, all_gather=1e7, reduce_scatter=1e7, all_reduce=1e7, point_to_point=1e6
    ),
}


MIXTURE: dict[str, Any] = {"experts": {"count": 4, "prototypes": 2}, "vocabularySize": 64}
LONG = pytest.mark.long
EVERYTHING = [
    *(pytest.param(name, {}, id=name, marks=LONG if number % 2 else ()) for number, name in enumerate(NETWORKS)),
    pytest.param("two ranks in a machine", MIXTURE, id="a mixture, two ranks in a machine"),
    *(pytest.param(name, MIXTURE, id=f"a mixture, {name}", marks=LONG) for name in [*NETWORKS][:3]),
    pytest.param("eight ranks on four cores", MIXTURE, id="a mixture, eight ranks on four cores", marks=LONG),
]


def eight_ranks(job_body: dict[str, Any], model: dict[str, Any]) -> None:
    """Configure a phase on eight ranks: four layers, or two layers with experts. Half a sequence has an odd number of
    tokens, so no layout cuts sequences."""
    job_body["spec"]["precision"] = {"compute": "float32"}
    job_body["spec"]["model"] |= {"sequenceLength": 18} | model
    if model:
        job_body["spec"]["model"]["layers"] = 2
        job_body["spec"]["phases"][0].pop("sharing", None)
    job_body["spec"]["phases"][PHASE] |= {"workers": 4, "processesPerWorker": 2, "batch": {"sequences": 8}}


@pytest.fixture
def phase(job_body: dict[str, Any], config: Callable[..., PhaseConfig]) -> PhaseConfig:
    """A phase of four layers on eight ranks."""
    eight_ranks(job_body, {})
    return config(PHASE)


def every_choice(phase: PhaseConfig) -> Iterator[Choice]:
    """Yield every choice of the phase with whole matrices, and any number of context ranks."""
    for context in context_choices(phase):
        yield from choices(phase, context)


def bound_and_seconds(phase: PhaseConfig, choice: Choice, hardware: HardwareProfile) -> tuple[float, float]:
    config = chosen(phase, choice)
    sizes = phase_sizes(config, "cpu")
    layout = fixed_layout(config, sizes)
    costs = MeasuredCosts(hardware, layout, sizes, phase.precision.compute)
    return min_step_seconds(layout, sizes, costs), timeline(layout, step_plan(layout), costs, STEPS).seconds


Ranked = tuple[float, int, tuple[int, ...]]
"""Seconds, tenths of the device that are free, simplicity."""


def ranked(layouts: list[Ranked]) -> list[Ranked]:
    """Return the layouts in groups of layouts that are at most 1 % slower than the fastest of the rest; in a group, the
    most free memory first, then the simplest."""
    rest, result = sorted(layouts), []
    while rest:
        group = [layout for layout in rest if layout[0] <= 1.01 * rest[0][0]]
        result += sorted(group, key=lambda layout: (-layout[1], layout[2]))
        rest = rest[len(group) :]
    return result


def peak(phase: PhaseConfig, choice: Choice, hardware: HardwareProfile) -> int:
    """Return the peak device bytes of a layout."""
    return plan_phase(chosen(phase, choice), "cpu", hardware, 1).report.peak_device_bytes


@pytest.mark.parametrize(("name", "model"), EVERYTHING)
def test_search_finds_the_same_layouts_as_brute_force(
    job_body: dict[str, Any], config: Callable[..., PhaseConfig], name: str, model: dict[str, Any]
) -> None:
    eight_ranks(job_body, model)
    phase = config(PHASE)
    everything = {choice: bound_and_seconds(phase, choice, NETWORKS[name]) for choice in choices(phase, 1)}
    expected = ranked([(seconds, 0, choice.simplicity) for choice, (_, seconds) in everything.items()])
    search = Search(phase, "cpu", NETWORKS[name], 1)
    assert [(found.seconds, 0, found.choice.simplicity) for found in search.fastest()] == expected
    assert len(expected) > 200
    assert expected[0][0] < expected[-1][0] / 2
    assert all(0 < bound <= seconds for bound, seconds in everything.values())
    assert max(bound / seconds for bound, seconds in everything.values()) > 0.9


def test_of_equally_fast_layouts_the_first_has_the_most_free_memory(phase: PhaseConfig) -> None:
    hardware = NETWORKS["fast networks"]
    needs = {choice: peak(phase, choice, hardware) for choice in choices(phase, 1)}
    memory = max(needs.values())
    known = hardware.model_copy(update={"device_bytes": memory})
    expected = ranked(
        [
            (bound_and_seconds(phase, choice, hardware)[1], 10 * (memory - need) // memory, choice.simplicity)
            for choice, need in needs.items()
        ]
    )
    found = [*Search(phase, "cpu", known, 1).fastest()]
    assert [(each.seconds, each.free_memory, each.choice.simplicity) for each in found] == expected
    simplest = ranked([(seconds, 0, simplicity) for seconds, _, simplicity in expected])
    assert simplest[0][2] != expected[0][2], "without the memory, another layout is first"


@pytest.mark.parametrize("name", ["slow updates", "eight ranks on four cores"])
def test_no_layout_is_faster_than_its_bound_without_global_clipping(phase: PhaseConfig, name: str) -> None:
    """Ranks that do not wait for each other may start a step during the previous one, so a few simulated steps look
    faster."""
    mode = phase.optimizer.clipping.model_copy(update={"mode": "PerUnit"})
    phase = phase.model_copy(update={"optimizer": phase.optimizer.model_copy(update={"clipping": mode})})
    best = min(found.seconds for found in islice(Search(phase, "cpu", NETWORKS[name], 1).fastest(), 20))
    assert best == min(max(bound_and_seconds(phase, choice, NETWORKS[name])) for choice in choices(phase, 1))


@pytest.mark.parametrize(
    ("model", "offload"),
    [({}, {}), (MIXTURE, {}), (MIXTURE, {"expertGroups": 2})],
    ids=["dense", "a mixture", "groups"],
)
def test_no_layout_with_streamed_units_is_faster_than_its_bound(
    job_body: dict[str, Any],
    config: Callable[..., PhaseConfig],
    model: dict[str, Any],
    offload: dict[str, Any],
) -> None:
    """Without overlap, copies run while passes wait."""
    hardware = profile(**GPUS, overlaps=False, ranks=8, h2d=2e6, point_to_point=2e6)
    eight_ranks(job_body, model)
    job_body["spec"]["phases"][PHASE] |= {"offload": {"home": "Host"} | offload, "batch": {"sequences": 64}}
    phase = config(PHASE)
    found = [bound_and_seconds(phase, choice, hardware) for choice in [*choices(phase, 1)][::9]]
    assert len(found) > 20
    assert all(0 < bound <= seconds for bound, seconds in found)


def test_schedules_that_do_not_know_all_routing_decisions_are_no_candidates(
    job_body: dict[str, Any], phase: PhaseConfig
) -> None:
    """With a loss over the step's routing decisions, an order must know all of them before the backward pass; with one
    micro-batch every order does."""

    def with_loss_over(of: str) -> PhaseConfig:
        experts = {"type": "TopK", "count": 4, "topK": {"perToken": 2, "auxiliaryLoss": "0.1", "balanceOver": of}}
        return phase.model_copy(
            update={"model": Model.model_validate(job_body["spec"]["model"] | {"experts": experts})}
        )

    balanced = with_loss_over("Step")
    assert set(choices(balanced, 1)) == {
        choice
        for choice in choices(with_loss_over("Sequence"), 1)
        if choice.schedule in ("Layered", "GPipe") or choice.micro_batches == 1
    }
    for choice in list(choices(balanced, 1))[::20]:
        plan_phase(chosen(balanced, choice), "cpu", None, 1)


def resolvable(job: PseudoRealJob) -> Iterator[Choice]:
    """Yield every choice that the job's validation accepts."""
    phase = job.spec.phases[PHASE]
    small, experts = range(1, 9), range(1, 5)
    kinds = get_args(Schedule), get_args(StateSharding), get_args(Keep)
    for pipeline, micro_batches, schedule, sharding, keep, replicas, spread in product(
        small, (1, 2, 4, 8), *kinds, (1, 2, 4, 8), experts
    ):
        update = {"pipeline": pipeline, "schedule": schedule, "replicas": replicas, "expert_ranks": spread}
        batch = phase.batch.model_copy(update={"micro_batches": micro_batches})
        parallelism = phase.parallelism.model_copy(update=update)
        of_rules = spread == 1 or (job.spec.model.experts and job.spec.model.experts.count % spread == 0)
        if pipeline > job.spec.model.layers or not of_rules or (replicas > 1 and sharding == "None"):
            continue
        try:
            rank_counts(job.spec, phase.model_copy(update={"parallelism": parallelism, "batch": batch}))
        except UnresolvableJob:
            continue
        yield Choice(pipeline, micro_batches, schedule, sharding, keep, replicas, spread)


@pytest.mark.parametrize("model", [{}, MIXTURE], ids=["dense", "a mixture"])
def test_candidates_are_all_layouts_that_a_job_may_request(
    job_body: dict[str, Any], config: Callable[..., PhaseConfig], model: dict[str, Any]
) -> None:
    """Except duplicates: one micro-batch on one pipeline rank has one order; there Interleaved equals 1F1B; nothing is
    sharded over one data rank; and replicas of one rank are the ranks of one replica."""
    eight_ranks(job_body, model)
    job = PseudoRealJob.model_validate(job_body)
    found = list(choices(config(PHASE), 1))
    assert len(found) == len(set(found))
    assert set(found) == {
        choice
        for choice in resolvable(job)
        if (choice.pipeline, choice.schedule) != (1, "Interleaved")
        and ((choice.pipeline, choice.micro_batches) != (1, 1) or choice.schedule == "Layered")
        and (choice.pipeline != 8 or choice.sharding == "None")
        and (choice.replicas == 1 or choice.pipeline * choice.replicas < 8)
    }


@pytest.mark.parametrize("field", ["norm", "experts"])
def test_expert_ranks_are_varied_only_where_a_job_may_request_them(phase: PhaseConfig, field: str) -> None:
    changes = {"norm": phase.model.norm.model_copy(update={"placement": "Post"})} if field == "norm" else {}
    phase = phase.model_copy(update={"model": phase.model.model_copy(update=changes)})
    assert {choice.expert_ranks for choice in choices(phase, 1)} == {1}


@pytest.mark.parametrize("blocks", [4, 2])
def test_candidates_with_muon_are_those_that_cut_no_matrix(phase: PhaseConfig, blocks: int) -> None:
    sharing = phase.sharing.model_copy(update={"blocks": blocks})
    with_muon = phase.optimizer.model_copy(update={"algorithm": "Muon"})
    shared = phase.model_copy(update={"sharing": sharing})
    expected = {
        choice
        for choice in choices(shared, 1)
        if choice.sharding == "None" and not phase_layout(chosen(shared, choice), "cpu").common_layer_units
    }
    assert set(choices(shared.model_copy(update={"optimizer": with_muon}), 1)) == expected
    assert {choice.pipeline for choice in expected} == ({1, 2, 4} if blocks == 4 else {1, 2})


def test_offloaded_activations_are_only_combined_with_keep_inputs(phase: PhaseConfig) -> None:
    on_host = phase.activations.model_copy(update={"home": "Host"})
    found = list(choices(phase.model_copy(update={"activations": on_host}), 1))
    assert {choice.keep for choice in found} == {"Inputs"}
    assert 3 * len(found) == len(list(choices(phase, 1)))


def test_compiled_blocks_are_never_combined_with_selective_recomputation(phase: PhaseConfig) -> None:
    compiled = phase.model_copy(update={"compile": phase.compile.model_copy(update={"mode": "Blocks"})})
    assert {choice.keep for choice in choices(compiled, 1)} == {"Inputs", "All"}


def test_layers_in_chunks_keep_inputs_in_every_layout(phase: PhaseConfig) -> None:
    chunked = phase.model_copy(update={"activations": phase.activations.model_copy(update={"sequence_chunks": 2})})
    assert {choice.keep for choice in choices(chunked, 1)} == {"Inputs"}


def test_layouts_that_do_not_fit_are_excluded(phase: PhaseConfig) -> None:
    """Half of the layouts fit into the memory of the machine."""
    hardware = NETWORKS["a slow network"]
    needs = {
        choice: plan_phase(chosen(phase, choice), "cpu", hardware, 1).report.peak_device_bytes
        for choice in choices(phase, 1)
    }
    bound = sorted(needs.values())[len(needs) // 2]
    small = hardware.model_copy(update={"device_bytes": bound})
    search = Search(phase, "cpu", small, 1)
    found = {entry.choice for entry in search.fastest()}
    assert found == {choice for choice, need in needs.items() if need <= bound}
    assert search.counts.too_large == len(needs) - len(found) > 0


def test_with_few_sequences_the_fastest_layout_cuts_them_though_whole_sequences_fit(
    job_body: dict[str, Any], config: Callable[..., PhaseConfig]
) -> None:
    """With two sequences for eight ranks, whole sequences keep at most two data ranks busy."""
    eight_ranks(job_body, {})
    job_body["spec"]["model"]["sequenceLength"] = 16
    job_body["spec"]["phases"][PHASE] |= {"batch": {"sequences": 2}, "parallelism": {"layout": "Auto"}}
    phase, hardware = config(PHASE), NETWORKS["fast networks"]
    everything = {choice: bound_and_seconds(phase, choice, hardware)[1] for choice in every_choice(phase)}
    assert {choice.context_ranks for choice in everything} == {1, 2, 4, 8}
    expected = ranked([(seconds, 0, choice.simplicity) for choice, seconds in everything.items()])
    found = [*Search(phase, "cpu", hardware, 1).fastest()]
    assert [(each.seconds, 0, each.choice.simplicity) for each in found] == expected
    assert found[0].choice.context_ranks > 1
    whole = [seconds for choice, seconds in everything.items() if choice.context_ranks == 1]
    assert min(whole) > 1.5 * found[0].seconds


def test_whole_sequences_are_simpler_than_any_cut() -> None:
    whole = Choice(8, 8, "Interleaved", "Full", "All", replicas=8, expert_ranks=8)
    assert whole.simplicity < Choice(1, 1, "Layered", "None", "Inputs", context_ranks=2).simplicity
    assert whole.simplicity < Choice(1, 1, "Layered", "None", "Inputs", tensor_ranks=2).simplicity


@pytest.mark.parametrize(
    ("workers", "processes", "heads", "context", "expected"),
    [(1, 8, 4, 1, [1, 2, 4]), (4, 2, 4, 1, [1, 2]), (1, 8, 4, 2, [1, 2]), (1, 8, 3, 1, [1]), (8, 1, 4, 1, [1])],
)
def test_tensor_ranks_divide_the_heads_and_the_ranks_of_a_pod(
    phase: PhaseConfig, workers: int, processes: int, heads: int, context: int, expected: list[int]
) -> None:
    """Sequences have two equal chunks for each of eight ranks; with two context ranks, of four."""
    attention = phase.model.attention.model_copy(update={"heads": heads, "head_size": 2, "key_value_heads": None})
    mlp = phase.model.feed_forward.model_copy(update={"size": 24})
    fields = {"sequence_length": 16 // context, "attention": attention, "feed_forward": mlp}
    asked = phase.model_copy(
        update={
            "workers": workers,
            "processes_per_worker": processes,
            "model": phase.model.model_copy(update=fields),
        }
    )
    assert tensor_choices(asked, context) == expected


@pytest.mark.parametrize(("length", "least", "expected"), [(16, 1, [1, 2, 4, 8]), (24, 2, [2, 4]), (18, 1, [1])])
def test_context_ranks_divide_the_ranks_and_half_a_sequence(
    phase: PhaseConfig, length: int, least: int, expected: list[int]
) -> None:
    model = phase.model.model_copy(update={"sequence_length": length})
    parallelism = phase.parallelism.model_copy(update={"context_ranks": least})
    asked = phase.model_copy(update={"model": model, "parallelism": parallelism})
    assert context_choices(asked) == expected


def test_budget_moves_units_before_a_layout_is_excluded(
    job_body: dict[str, Any], config: Callable[..., PhaseConfig], phase: PhaseConfig
) -> None:
    hardware = NETWORKS["fast networks"]
    most = min(
        plan_phase(chosen(phase, choice), "cpu", hardware, 1).report.peak_device_bytes for choice in choices(phase, 1)
    )
    job_body["spec"]["phases"][PHASE]["offload"] = {"budget": {"device": most - 1}}
    budgeted = config(PHASE)
    best = next(Search(budgeted, "cpu", hardware, 1).fastest())
    report = plan_phase(chosen(budgeted, best.choice), "cpu", hardware, 1).report
    assert report.fits
    assert "Host" in report.homes.values()
    assert report.step_seconds == best.seconds


SLOW_HOMES: dict[str, Any] = {"h2d": 1e7, "d2h": 1e7, "disk_read": 3e6, "disk_write": 1e6, "point_to_point": 1e7}
SLOW_HOMES |= {"update_on_host_seconds_per_element": 1e-7, "update_on_device_seconds_per_element": 1e-8}


@pytest.mark.parametrize(
    ("model", "clipping", "sharing", "groups"),
    [
        pytest.param({}, "PerUnit", {}, 1, id="dense"),
        pytest.param(MIXTURE, "PerUnit", {}, 2, id="groups of experts"),
        pytest.param({}, "Global", {}, 1, id="dense, a common end of steps", marks=LONG),
        pytest.param({}, "PerUnit", {"blocks": 2}, 1, id="blocks in common", marks=LONG),
        pytest.param(MIXTURE, "Global", {}, 1, id="a mixture", marks=LONG),
    ],
)
def test_search_under_a_budget_finds_the_same_layouts_as_brute_force(
    job_body: dict[str, Any],
    config: Callable[..., PhaseConfig],
    model: dict[str, Any],
    clipping: str,
    sharing: dict[str, Any],
    groups: int,
) -> None:
    """Units move to hosts and disks, and layouts that do not fit are left out. Where ranks do not wait for each other,
    few simulated steps may look faster than the layout's bound."""
    eight_ranks(job_body, model)
    hardware = profile(**GPUS, **SLOW_HOMES)
    job_body["spec"]["optimizer"]["clipping"] = {"mode": clipping}
    job_body["spec"]["phases"][PHASE] |= {"sharing": sharing} if sharing else {}
    whole = config(PHASE)
    needs = sorted(peak(whole, choice, hardware) for choice in [*choices(whole, 1)][::7])
    budget = {"device": needs[len(needs) // 4], "host": 20_000}
    job_body["spec"]["phases"][PHASE]["offload"] = {"budget": budget, "expertGroups": groups}
    phase = config(PHASE)
    reports = {choice: plan_phase(chosen(phase, choice), "cpu", hardware, 1).report for choice in choices(phase, 1)}
    fitting = {choice: report for choice, report in reports.items() if report.fits}
    assert {home for report in fitting.values() for home in report.homes.values()} == {"Device", "Host", "Disk"}
    assert 50 < len(fitting) < len(reports)
    search = Search(phase, "cpu", hardware, 1)
    found = {entry.choice: entry.seconds for entry in search.fastest()}
    assert found.keys() == fitting.keys()
    assert all(one <= 1.01 * other for one, other in pairwise(found.values()))
    seconds = {choice: float(report.step_seconds or 0) for choice, report in fitting.items()}
    if clipping == "Global":
        assert found == seconds
    best = min(found, key=lambda choice: (found[choice], choice.simplicity))
    assert seconds[best] == found[best] == min(seconds.values())


@pytest.fixture(scope="module")
def cluster() -> HardwareProfile:
    return read_profile(Path(paths.REPOSITORY / "examples" / "hardware" / "gpu-cluster.yaml"))


def test_search_for_512_ranks_takes_less_than_a_minute(job_body: dict[str, Any], cluster: HardwareProfile) -> None:
    job_body["spec"]["precision"] = {"compute": "bfloat16"}
    job_body["spec"]["model"] |= {
        "layers": 48,
        "hiddenSize": 8192,
        "sequenceLength": 2048,
        "attention": {"heads": 64, "keyValueHeads": 8},
        "feedForward": {"size": 28672, "activation": "SwiGLU"},
        "vocabularySize": 128_256,
    }
    job_body["spec"]["phases"] = [
        {
            "name": "real",
            "until": {"step": 10},
            "workers": 64,
            "processesPerWorker": 8,
            "batch": {"sequences": 1024},
        }
    ]
    job = PseudoRealJob.model_validate(job_body)
    phase = phase_config(job, 0, execution=1, work_directory=".", offload_directory=".")
    begin = time.process_time()
    search = Search(phase, "accelerator", cluster, 1)
    first, second, third = islice(search.fastest(), 3)
    print(f"{time.process_time() - begin:.1f} s, {search.counts}, {first}")
    assert time.process_time() - begin < 60 * slowness()
    assert first.seconds <= 1.01 * second.seconds <= 1.01**2 * third.seconds
    assert search.counts.simulated < search.counts.layouts / 20


def test_matrices_are_cut_if_no_layout_with_whole_matrices_fits(
    job_body: dict[str, Any], config: Callable[..., PhaseConfig]
) -> None:
    """A layer's gradient is whole on each rank until it is summed, unless the layer's matrices are cut."""
    eight_ranks(job_body, {"sequenceLength": 16, "attention": {"heads": 8}, "hiddenSize": 128})
    job_body["spec"]["model"]["feedForward"] = {"size": 512}
    job_body["spec"]["phases"][PHASE] |= {
        **{"workers": 1, "processesPerWorker": 4, "batch": {"sequences": 2}},
        "parallelism": {"layout": "Auto"},
    }
    phase, hardware = config(PHASE), NETWORKS["fast networks"]

    def least(tensor: int) -> int:
        """Return the device bytes that every layout with this number of tensor ranks exceeds or reaches."""
        every = (choice for context in context_choices(phase) for choice in choices(phase, context, tensor))
        return min(plan_phase(chosen(phase, choice), "cpu", hardware, 1).report.peak_device_bytes for choice in every)

    whole, cut = least(1), least(4)
    assert cut < whole
    for memory, ranks in {whole: {1}, whole - 1: {2, 4}}.items():
        small = hardware.model_copy(update={"device_bytes": memory})
        found = [*Search(phase, "cpu", small, 1).fastest()]
        assert found
        assert {each.choice.tensor_ranks for each in found} <= ranks

"""Numbers of workers that an elastic phase can have, and the micro-batch of a rank for each."""

from itertools import pairwise
from math import ceil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pseudoreal_api.resolved.check import check_resolvable
from pseudoreal_api.resolved.elastic import laid_out, most_workers, resized
from pseudoreal_api.resolved.resolve import RankCounts, UnresolvableJob, rank_counts
from pseudoreal_api.spec.check import check_job
from pseudoreal_api.spec.job import PseudoRealJobSpec
from pseudoreal_api.spec.model import MixtureOfExperts
from pseudoreal_api.spec.phase import Batch, Elastic, Parallelism, Phase

from tests.support.depth import DEPTH
from tests.support.jobs import good_job

FULL = {"stateSharding": "Full"}


def job(
    workers: int = 4, least: int = 1, batch: Any = None, parallelism: Any = None, **phase: Any
) -> PseudoRealJobSpec:
    changes = {
        "workers": workers,
        "elastic": {"minWorkers": least},
        "batch": batch or {"sequences": 24, "microBatches": 2},
        "parallelism": parallelism or FULL,
    }
    return check_job(good_job(**{f"spec__phases__1__{name}": value for name, value in (changes | phase).items()})).spec


def sizes(spec: PseudoRealJobSpec) -> dict[int, int]:
    """Return number of workers -> micro-batches, for each number of workers that the phase can have."""
    phase = spec.phases[1]
    numbers = sorted({found for limit in range(1, phase.workers + 1) if (found := most_workers(spec, 1, limit))})
    return {number: laid_out(spec, phase, number).batch.micro_batches for number in numbers}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        # Three sequences per rank at a time: 24 / 2 / 4, 24 / 3 / 3 (some ranks have fewer), 24 / 4 / 2, 24 / 8 / 1.
        (job(), {1: 8, 2: 4, 3: 3, 4: 2}),
        (job(least=2), {2: 4, 3: 3, 4: 2}),
        # One sequence per rank at a time: no divisor of 8 gives each of three ranks at least one and at most one.
        (job(batch={"sequences": 8, "microBatches": 2}), {1: 8, 2: 4, 4: 2}),
        (job(least=2, parallelism=FULL | {"replicas": 2}), {2: 4, 4: 2}),
        (job(parallelism={"pipeline": 2}, processesPerWorker=2), {1: 8, 2: 4, 3: 3, 4: 2}),
        (job(least=2, parallelism={"pipeline": 2}), {2: 4, 4: 2}),
        # Each stage has all sequences of a micro-batch, for every number of stages.
        (job(parallelism={"pipeline": "AllRanks"}), {1: 2, 2: 2, 3: 2, 4: 2}),
        # Interleaved needs the 8 layers in equal parts.
        (job(parallelism={"pipeline": "AllRanks", "schedule": "Interleaved"}), {1: 2, 2: 2, 4: 2}),
    ],
)
def test_the_sizes_of_a_phase(spec: PseudoRealJobSpec, expected: dict[int, int]) -> None:
    assert sizes(spec) == expected


def test_fewer_workers_do_not_have_micro_batches_whose_choices_come_too_late() -> None:
    """A loss over a step's routing decisions works with 1F1B only with one micro-batch; fewer workers would
    need two."""
    top_k = {"perToken": 2, "auxiliaryLoss": "0.1", "balanceOver": "Step"}
    experts = {"type": "TopK", "count": 4, "topK": top_k}
    changes = {"batch": {"sequences": 8, "microBatches": 1}, "parallelism": {"pipeline": 2, "schedule": "1F1B"}}
    fields = {f"spec__phases__1__{name}": value for name, value in changes.items()}
    spec = check_job(
        good_job(
            spec__model__experts=experts,
            spec__phases__1__workers=4,
            spec__phases__1__elastic={"minWorkers": 2},
            **fields,
        )
    ).spec
    assert sizes(spec) == {4: 1}
    with pytest.raises(UnresolvableJob, match=r"minWorkers is 2, but .*; the next number that fits is 4"):
        check_resolvable(spec)


def test_without_elastic_there_is_one_size() -> None:
    spec = check_job(good_job()).spec
    assert (most_workers(spec, 1, 2), most_workers(spec, 1, 1)) == (2, None)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"least": 1, "parallelism": {"pipeline": 2}},
            r"spec.phases\[real\].elastic.minWorkers is 1, .* = 1 ranks, not a multiple of parallelism.pipeline 2;"
            r" change one of them\); the next number that fits is 2",
        ),
        (
            {"least": 3, "batch": {"sequences": 8, "microBatches": 2}},
            r"minWorkers is 3, .*no number of micro-batches divides batch.sequences 8 so that each of 3 data-parallel"
            r" ranks, on 3 workers, has between 1 and 1 sequences of a micro-batch, as on 4 workers; .*; the next"
            r" number that fits is 4",
        ),
        ({"least": 1, "workers": 3, "parallelism": {"pipeline": 2}}, r"= 3 ranks, not a multiple"),
    ],
)
def test_a_number_that_does_not_divide_is_refused_with_one_that_does(changes: Any, says: str) -> None:
    with pytest.raises(UnresolvableJob, match=says):
        check_resolvable(job(**changes))


def test_the_other_phases_stay_as_they_are() -> None:
    spec = job()
    found = resized(spec, 1, 2)
    assert (found.phases[0], found.phases[1].workers, spec.phases[1].workers) == (spec.phases[0], 2, 4)


@given(
    workers=st.integers(2, 12),
    sequences=st.integers(1, 96),
    micro_batches=st.integers(1, 8),
    pipeline=st.sampled_from([1, 2, 4]),
    processes=st.sampled_from([1, 2]),
)
def test_no_rank_has_more_at_a_time_and_none_has_nothing(
    workers: int, sequences: int, micro_batches: int, pipeline: int, processes: int
) -> None:
    batch = {"sequences": sequences * micro_batches, "microBatches": micro_batches}
    spec = job(workers, 1, batch, FULL | {"pipeline": pipeline}, processesPerWorker=processes)
    try:
        most = at_a_time(spec, spec.phases[1])
    except UnresolvableJob:
        return
    for number, micro in sizes(spec).items():
        phase = resized(spec, 1, number).phases[1]
        assert (phase.batch.sequences, phase.batch.micro_batches) == (sequences * micro_batches, micro)
        assert phase.batch.sequences % micro == 0
        assert 1 <= at_a_time(spec, phase) <= most


@st.composite
def elastic_phases(draw: st.DrawFn) -> PseudoRealJobSpec:
    """Draw phases of all kinds, including some that the API server's rules reject."""
    layout: Any = draw(st.sampled_from(["Given", "Given", "Given", "Auto"]))
    schedule: Any = draw(st.sampled_from(["Layered", "GPipe", "1F1B", "Interleaved"]))
    parallelism = Parallelism(
        layout=layout,
        schedule=schedule,
        pipeline=draw(st.sampled_from([1, 2, 3, 4, "AllRanks"])),
        replicas=draw(st.sampled_from([1, 1, 2, 3])),
        expert_ranks=draw(st.sampled_from([1, 1, 2])),
    )
    micro_batches, workers = draw(st.integers(1, 6)), draw(st.integers(2, 40))
    batch = Batch(sequences=micro_batches * draw(st.integers(1, 240)), micro_batches=micro_batches)
    processes, least = draw(st.sampled_from([1, 2, 3, 8])), draw(st.integers(1, workers))
    spec = check_job(good_job()).spec
    top_k = {"perToken": 1, "balanceOver": draw(st.sampled_from(["Step", "Sequence"])), "auxiliaryLoss": "0.1"}
    experts = MixtureOfExperts.model_validate({"type": "TopK", "count": 2, "topK": top_k})
    model = spec.model.model_copy(update={"layers": draw(st.integers(1, 30)), "experts": experts})
    changed = {
        "workers": workers,
        "processes_per_worker": processes,
        "batch": batch,
        "parallelism": parallelism,
        "elastic": Elastic(min_workers=least),
        "sharing": None,
    }
    phases = [spec.phases[0], spec.phases[1].model_copy(update=changed)]
    return spec.model_copy(update={"model": model, "phases": phases})


@settings(max_examples=DEPTH.of(300, 10_000), derandomize=not DEPTH.is_deep)
@given(spec=elastic_phases())
def test_what_follows_by_arithmetic_is_what_is_found_by_trying(spec: PseudoRealJobSpec) -> None:
    phase = spec.phases[1]
    assert phase.elastic
    fitting = []
    for workers in range(1, phase.workers + 1):
        tried = try_micro_batches(spec, phase, workers)
        if tried is None:
            with pytest.raises(UnresolvableJob):
                laid_out(spec, phase, workers)
        else:
            assert laid_out(spec, phase, workers).batch.micro_batches == tried
        fitting += [workers] if tried is not None and workers >= phase.elastic.min_workers else []
    for limit in range(phase.workers + 2):
        assert most_workers(spec, 1, limit) == max((n for n in fitting if n <= limit), default=None)


def try_micro_batches(spec: PseudoRealJobSpec, phase: Phase, workers: int) -> int | None:
    """Return the fewest micro-batches for this many workers by trying all divisors of the sequences; None
    if none fits."""
    try:
        most = most_at_a_time(phase, rank_counts(spec, phase))
        ranks = rank_counts(spec, phase.model_copy(update={"workers": workers}))
    except UnresolvableJob:
        return None
    for number in range(phase.batch.micro_batches, phase.batch.sequences + 1):
        if phase.batch.sequences % number == 0:
            batch = phase.batch.model_copy(update={"micro_batches": number})
            found = phase.model_copy(update={"workers": workers, "batch": batch})
            try:
                rank_counts(spec, found)
            except UnresolvableJob:
                continue
            if most_at_a_time(found, ranks) <= most:
                return number
    return None


def most_at_a_time(phase: Phase, ranks: RankCounts) -> int:
    return ceil(phase.batch.sequences // phase.batch.micro_batches / (ranks.ranks // ranks.pipeline))


def at_a_time(spec: PseudoRealJobSpec, phase: Phase) -> int:
    """Return the most sequences of a rank, counted one by one; each rank has at least one."""
    ranks = rank_counts(spec, phase)
    data, width = ranks.ranks // ranks.pipeline, phase.batch.sequences // phase.batch.micro_batches
    borders = [width * rank // data for rank in range(data + 1)]
    shares = [after - before for before, after in pairwise(borders)]
    assert min(shares) >= 1
    return max(shares)

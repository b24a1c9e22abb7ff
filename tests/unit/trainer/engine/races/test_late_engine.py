"""The engine on a device that executes late: whatever the order, the numbers are those of the same run on the CPU, to
the bit. Without any of its waits, some order shows it."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from pseudoreal_trainer.engine.ranks.streams import Stream

from tests.support.depth import DEPTH
from tests.unit.trainer.engine.races.support.accounted import FOUND
from tests.unit.trainer.engine.races.support.late import Drawn, Latest, Schedule, Starving, Stuck
from tests.unit.trainer.engine.races.support.machine import COMPUTE
from tests.unit.trainer.engine.races.support.scenario import Late, Numbers, Outcome, TrainedCase, run
from tests.unit.trainer.engine.races.support.scenarios import SCENARIOS, SEVERAL_RANKS
from tests.unit.trainer.engine.races.support.sites import Site

STREAMS = (*(stream.value for stream in reversed(Stream)), COMPUTE, "group")
"""Streams of a rank; `group` are those of process groups."""
SAMPLE: dict[str, Schedule] = {
    "all homes, clipped by unit": Latest(),
    "offloaded activations, 1F1B": Drawn(1),
    "groups over ranks": Starving(Stream.COPY_IN.value),
    "pipeline": Drawn(2),
    "1F1B, on CPUs": Latest(),
}
LOST_IN_EACH_RUN = [site for site in FOUND if site.file in ("engine/state/snapshot.py", "engine/passes.py")]
"""Waits whose removal is tried in every run."""


def _schedules(name: str) -> list[Schedule]:
    """Return the schedules of a scenario in this run."""
    if not DEPTH.is_deep:
        return [SAMPLE[name]]
    chance = DEPTH.chance(name)
    return [Latest(), Starving(chance.choice(STREAMS)), *(Drawn(chance.randrange(2**32)) for _ in range(2))]


@cache
def _on_the_cpu(name: str) -> list[Numbers]:
    """Return the numbers of a scenario on ranks on the CPU. A device has other kernels for norms, and some scenarios
    use a device themselves: for these, return the numbers of a device whose work is done, on the CPU, when it is
    launched."""
    scenario = SCENARIOS[name]
    if isinstance(scenario, TrainedCase) and scenario.case.clipping == "None":
        scenario = replace(scenario, device="cpu")
    with TemporaryDirectory() as folder:
        return run(scenario, Path(folder)).numbers


@pytest.mark.parametrize("name", DEPTH.of(tuple(SAMPLE), tuple(SCENARIOS)))
def test_a_device_that_executes_late_computes_the_bits_of_the_cpu(name: str, tmp_path: Path) -> None:
    for number, schedule in enumerate(_schedules(name)):
        outcome = run(SCENARIOS[name], tmp_path / str(number), late=Late(schedule))
        assert outcome.races == [], schedule.name
        assert outcome.numbers == _on_the_cpu(name), schedule.name


@pytest.mark.parametrize("site", DEPTH.of(LOST_IN_EACH_RUN, FOUND), ids=str)
def test_some_schedule_shows_that_a_wait_is_missing(site: Site, tmp_path: Path) -> None:
    name = FOUND[site]
    for number, schedule in enumerate(_adverse_schedules()):
        outcome = run(SCENARIOS[name], tmp_path / str(number), removed=site, late=Late(schedule))
        if _is_wrong(outcome, name):
            break
    else:
        pytest.fail("all schedules compute the right numbers")
    assert site in outcome.reached


def _adverse_schedules() -> Iterator[Schedule]:
    yield Latest()
    yield from map(Starving, STREAMS)
    yield from map(Drawn, range(6))


def _is_wrong(outcome: Outcome, name: str) -> bool:
    return outcome.failure is not None or bool(outcome.races) or outcome.numbers != _on_the_cpu(name)


@pytest.mark.long
@pytest.mark.parametrize("queues", [1, 2, 8])
@pytest.mark.parametrize("name", SEVERAL_RANKS)
def test_too_few_hardware_queues_change_no_bit_and_end_the_run_if_ranks_wait_for_each_other(
    name: str, queues: int, tmp_path: Path
) -> None:
    report = ""
    try:
        outcome = run(SCENARIOS[name], tmp_path, late=Late(Latest(), queues, patience=10))
    except Stuck as stuck:
        report = str(stuck)
    if report:
        assert "waits for other ranks" in report or "have not launched it" in report
    else:
        assert outcome.numbers == _on_the_cpu(name)


def test_a_rank_alone_needs_one_hardware_queue(tmp_path: Path) -> None:
    outcome = run(SCENARIOS["device"], tmp_path, late=Late(Drawn(3), queues=1))
    assert outcome.numbers == _on_the_cpu("device")


def test_ranks_of_a_pipeline_wait_for_each_other_for_ever_with_the_queues_that_cuda_has_by_default(
    tmp_path: Path,
) -> None:
    """Therefore the trainer sets CUDA_DEVICE_MAX_CONNECTIONS."""
    with pytest.raises(Stuck, match=r"queue 0 of rank 0: receive .* follow") as stuck:
        run(SCENARIOS["pipeline"], tmp_path, late=Late(Latest(), queues=8, patience=2))
    assert "8 hardware queues" in str(stuck.value)

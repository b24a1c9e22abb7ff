"""Small made-up results of every benchmark, in the format of its program, with the names of all its cases."""

from collections.abc import Iterator
from typing import Any

from benchmarks import checkpoints, depth, predictions, versions, versions_results
from benchmarks.cases import all_cases
from benchmarks.data.results import (
    ALONE,
    DATATROVE,
    LONG,
    MEGATRON,
    OURS,
    PLAIN,
    WHOLE,
    Cell,
    Losses,
    Preparing,
    Reading,
    Resident,
    Results,
    Training,
)
from benchmarks.gpu import results as gpu_results
from benchmarks.gpu.cases import TIMED, suite
from benchmarks.machine import Stamp
from benchmarks.method.experiments import EXPERIMENTS, Experiment
from benchmarks.method.lives import Life, PhaseLife, Point
from benchmarks.moe.experiments import EXPERIMENTS as MIXTURES
from benchmarks.moe.experiments import SEEDS
from benchmarks.operator import results as operator_results
from benchmarks.results import Machine, Run, Step
from benchmarks.results import Results as Runs
from benchmarks.stacks.registry import STACKS

MACHINE = Machine(processor="abacus", cores=2, memory_gib=1.0, versions={"torch": "9"})
_STEADY, _BUSY = [1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 1.0, 2.0]


def cell(stack: str, case: str, *seconds: float, peak: int | None = None) -> Cell:
    return Cell(stack=stack, case=case, seconds=[*seconds], peak_bytes=peak)


PREPARING = Preparing(
    cells=[cell(ALONE, "text", 8.0, 8.0), cell(OURS, "text", 10.0, 10.0)],
    text_bytes=20_000_000,
    documents=3000,
    vocabulary=32_768,
    train_seconds=9.0,
)
READING = Reading(
    cells=[
        cell(OURS, "warm", *_STEADY),
        cell(MEGATRON, "warm", 2.5, 2.5, 2.5, 2.5),
        cell(LONG, "warm", 1.5, 1.5, 1.5, 1.5),
        cell(DATATROVE, "warm", 0.5, 0.5, 0.5, 0.5),
        cell(OURS, "cold", *_STEADY),
        cell(MEGATRON, "cold", *_BUSY),
        cell(LONG, "cold", 3.0, 3.0, 3.0, 3.0),
        cell(DATATROVE, "cold", 4.0, 4.0, 4.0, 4.0),
    ],
    file_bytes=1 << 32,
    window=4097,
    windows={"warm": 20_000, "cold": 1000},
    versions={"megatron-core": "0.1"},
)
RESIDENT = Resident(
    samples=10**12,
    sequence=8,
    token_bytes=16 * 10**12,
    files=7472,
    steps=500,
    batch=1024,
    before_bytes=300 << 20,
    grown_bytes=110 << 20,
)
LOSSES = Losses(
    cells=[
        cell(OURS, "32,768", 0.5, 0.5, peak=300 << 20),
        cell(WHOLE, "32,768", 0.4, 0.4, peak=1600 << 20),
    ],
    tokens=4096,
    hidden=256,
)
TRAINING = Training(
    cells=[cell(OURS, "step", 0.5, 0.5), cell(PLAIN, "step", 0.6, 0.6)],
    model="Llama3: 6 layers",
    parameters=12_300_000,
    threads=2,
    sequences=8,
    sequence_length=256,
    steps=20,
    first_loss=9.9,
    last_loss=6.25,
    apart=3.2e-7,
    waited=[0.001, 0.003, 0.002],
)
ALL = Results(
    machine=MACHINE,
    preparing=PREPARING,
    reading=READING,
    resident=RESIDENT,
    losses=LOSSES,
    training=TRAINING,
    measured={"reading": Stamp(date="2026-01-02", commit="abc+")},
)


def on_a_gpu() -> gpu_results.Results:
    """Return results with one point of the first case; all other points are left out."""
    first, second = suite(tiny=False).cases[:2]
    measured = gpu_results.Measured(
        point=first.points[0],
        seconds=(2.0, 1.0, 1.5),
        losses=(5.5,) * TIMED,
        hidden_share=0.91,
        device_peak_bytes=10 * 2**30,
        pinned_bytes=2**30,
        host_peak_bytes=0,
        forecast=gpu_results.Forecast(seconds=1.8, device_bytes=9 * 2**30, host_bytes=0),
    )
    records = (
        gpu_results.Record(case=first, measured=(measured,), left_out=first.points[1:]),
        gpu_results.Record(case=second, left_out=second.points, problem="ended by signal 9"),
    )
    machine = gpu_results.Machine(
        device="A",
        driver="5",
        versions={"torch": "2.11"},
        cores=16,
        memory_gib=128,
        commit="c" * 40,
        date="2026-01-02T03",
    )
    return gpu_results.Results(
        machine=machine, is_tiny=False, budget_seconds=1, seconds=2, disk="tmpfs", records=records
    )


def operator_record(jobs: int, **changes: Any) -> operator_results.Record:
    few = operator_results.Quantiles(count=10, p50=0.5, p99=1.0)
    made: dict[str, Any] = {
        "jobs": jobs,
        "date": "2026-01-02",
        "commit": "abc",
        "machine": "2 cores",
        "others": 0.05,
        "answers": few,
        "flight": operator_results.Flight(seconds=10.0, processor_seconds=2.0),
        "quiet": operator_results.Quiet(seconds=70.0, for_jobs={}, lease=1.0, processor_share=0.01),
        "start_up": operator_results.StartUp(
            lease_seconds=1.0,
            drained_seconds=jobs / 100,
            processor_seconds=2.0,
            longest_gap=2.0,
            lease_lost=0,
            transitions=0,
        ),
        "requests_per_life": {"get pods": 3.0},
        "reaction": few,
        "job_controller": few,
        "rate": 1.0,
        "bulk": operator_results.Bulk(jobs=jobs // 2, seconds=10.0, processor_seconds=3.0, reaction=few),
        "peak_bytes": 100_000_000 + 10_000 * jobs,
        "processor_seconds": 20.0,
        "complaints": {"event_lost": 3},
    }
    return operator_results.Record(**made | changes)


def runs() -> Runs:
    """Return runs of every stack in every case, with two timed steps each."""
    steps = [Step(seconds=each, loss=1.0) for each in (9.0, 1.0, 1.0)]
    found = [Run(stack=stack, case=case, round=0, warm_up=1, steps=steps) for case in all_cases() for stack in STACKS]
    return Runs(machine=MACHINE, runs=found)


def compared_versions() -> versions_results.Versions:
    steps = [versions_results.VersionSteps(warm_up=0, seconds=[1.0], waited=[0.5], losses=[2.0])]
    pairs = [versions_results.VersionPair(case=case, base=steps, new=steps) for case in versions.cases()]
    return versions_results.Versions(base="abc", new="def", pairs=pairs)


def depths() -> list[depth.Depth]:
    return [depth.Depth(layers=layers, seconds=layers / 1000, window_bytes=1 << 20) for layers in depth.LAYERS]


def predicted() -> list[predictions.Prediction]:
    labels = [configuration.label for ranks in (1, 2) for configuration in predictions.configurations(ranks)]
    return [predictions.Prediction(label=label, predicted=1.1, measured=1.0) for label in labels]


def savings() -> checkpoints.Measured:
    """Return every way of saving. pseudoreal in mode Sync takes 4 s, all others 1 s."""
    return checkpoints.Measured(
        bytes=1 << 30,
        copy_seconds=1.0,
        read_seconds=1.0,
        load_seconds=2.0,
        cold_read_seconds=3.0,
        cold_load_seconds=4.0,
        dcp_load_seconds=5.0,
        step_seconds=0.1,
        savings=[
            checkpoints.Saving(
                way=way, seconds=4.0 if way == "pseudoreal, Sync" else 1.0, stall_seconds=0.5, extra_bytes=1 << 20
            )
            for way in checkpoints.WAYS
        ],
    )


def lives() -> list[Life]:
    """Return every experiment of the method with each of its seeds."""
    return [
        Life(experiment=experiment.name, seed=seed, phases=[*_phases(experiment)])
        for experiment in EXPERIMENTS
        for seed in experiment.seeds
    ]


def mixtures() -> list[Life]:
    """Return every mixture with each seed. The loss rises by 0.02 per seed and falls by 0.1 per mixture; each mixture's
    steps take a second longer than the previous one's."""
    return [
        Life(experiment=mixture.name, seed=seed, phases=[_last_phase(1.0 + number, 2 - number / 10 + seed / 50)])
        for number, mixture in enumerate(MIXTURES)
        for seed in SEEDS
    ]


def _last_phase(seconds: float, loss: float) -> PhaseLife:
    point = Point(step=10, tokens=10, loss=loss)
    return PhaseLife(
        name="real", first_step=1, steps=10, seconds_per_step=seconds, peak_bytes=0, points=[point], correlations={}
    )


def _phases(experiment: Experiment) -> Iterator[PhaseLife]:
    """Yield phases of ten steps, with a validation at both ends."""
    names = ["pseudo"] if experiment.shared else ["pseudo", "real"] if experiment.pseudo else ["real"]
    for index, name in enumerate(names):
        yield PhaseLife(
            name=name,
            first_step=10 * index + 1,
            steps=10,
            seconds_per_step=1.0,
            peak_bytes=1 << 20,
            points=[Point(step=step, tokens=step, loss=3 - step / 10) for step in (10 * index, 10 * index + 10)],
            correlations={10: [0.25, 0.5, 0.75]},
        )

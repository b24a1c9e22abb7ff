"""The claim of each benchmark counts wins and losses of its raw results."""

from typing import Any

from pseudoreal_api.spec.phase import Home

from benchmarks import checkpoints, predictions, step_times
from benchmarks.cases import Case
from benchmarks.checkpoints import OURS_ASYNC, OURS_SYNC, Saving
from benchmarks.checkpoints import Measured as MeasuredSave
from benchmarks.claims import Claim
from benchmarks.data import report as data_report
from benchmarks.data.results import ALONE, OURS, Cell, Preparing, Resident
from benchmarks.data.results import Results as DataResults
from benchmarks.gpu import report as gpu_report
from benchmarks.gpu.cases import Case as GpuCase
from benchmarks.gpu.cases import Point, Stack
from benchmarks.gpu.results import Forecast, Measured, Record
from benchmarks.gpu.results import Machine as GpuMachine
from benchmarks.gpu.results import Results as GpuResults
from benchmarks.machine import Stamp
from benchmarks.moe import steps_report
from benchmarks.moe.beside.cases import WARM_UP
from benchmarks.moe.beside.cases import Case as MixtureCase
from benchmarks.moe.beside.names import DEEPSPEED, GRADIENTS
from benchmarks.moe.results import Beside
from benchmarks.moe.results import Results as MixtureResults
from benchmarks.moe.results import Run as MixtureRun
from benchmarks.moe.results import Step as MixtureStep
from benchmarks.operator.beside import report as beside_report
from benchmarks.operator.beside.results import Idle, Life, Lives
from benchmarks.operator.results import Quantiles
from benchmarks.predictions import Prediction
from benchmarks.results import Machine, Results, Run, Step
from benchmarks.summary import DEVICE, WHOLE

MACHINE = Machine(
    processor="one",
    cores=2,
    memory_gib=4.0,
    versions={"torch": "2", "deepspeed": "1"},
    date="2026-11-26",
    commit="0123abc",
    release="0.4.0",
)
STAMP = Stamp(date="2026-11-26", commit="0123abc", release="0.4.0")


def test_step_times_count_quiet_comparisons_by_peer() -> None:
    """fully_shard is slower in the one case, and DistributedDataParallel faster; a cell that is not quiet counts
    nowhere."""
    case, noisy = (Case(model="tiny", micro_batches=n, recompute=False) for n in (1, 4))
    seconds = {
        (DEVICE, case): [1.0, 1.0, 1.0],
        (WHOLE, case): [1.0, 1.0, 1.0],
        ("fully_shard", case): [2.0, 2.0, 2.0],
        ("DistributedDataParallel", case): [0.5, 0.5, 0.5],
        (DEVICE, noisy): [1.0, 1.0, 1.0],
        ("fully_shard", noisy): [0.1, 1.0, 9.0],
    }
    runs = [
        Run(stack=stack, case=of, round=0, warm_up=0, steps=[Step(seconds=s, loss=1.0) for s in found])
        for (stack, of), found in seconds.items()
    ]
    claim = step_times.claim(Results(machine=MACHINE, runs=runs))
    assert claim.in_readme == "faster than torch and DeepSpeed in 1 of 2 comparisons of a training step"
    assert claim.result == (f"pseudoreal is {claim.in_readme}, with factors of 2.00× to 2.00×",)
    assert claim.loses == (
        "pseudoreal is slower than *DistributedDataParallel* in 1 of 1 comparisons; the worst factor is 0.50×",
    )
    assert claim.release == "0.4.0"


def test_steps_on_a_gpu_compare_the_same_settings_with_the_best_number_of_micro_batches() -> None:
    def record(
        stack: Stack, home: Home, *steps: tuple[int, float, float | None], host: int = 1, **settings: Any
    ) -> Record:
        """`steps`: number of micro-batches, seconds, and predicted seconds. `host`: GiB of host memory."""
        measured = tuple(
            Measured(
                point=Point(tokens=8, micro_batches=n),
                seconds=(seconds,) * 3,
                losses=(1.0,),
                hidden_share=None,
                device_peak_bytes=1,
                pinned_bytes=0,
                host_peak_bytes=host * 2**30,
                forecast=None if predicted is None else Forecast(seconds=predicted, device_bytes=1, host_bytes=1),
            )
            for n, seconds, predicted in steps
        )
        fields = {"model": "m", "stack": stack, "home": home, "clipping": "Global"} | settings
        return Record(case=GpuCase(points=tuple(one.point for one in measured), **fields), measured=measured)

    def claim_of(*records: Record) -> Claim | None:
        known = {"device": "one", "driver": "1", "commit": "0123abcdef", "release": "0.4.0", "date": "2026-11-26T01:02"}
        machine = GpuMachine(versions={"torch": "2"}, cores=2, memory_gib=4.0, **known)
        return gpu_report.claim(
            GpuResults(machine=machine, is_tiny=False, budget_seconds=1, seconds=1, disk="tmpfs", records=records)
        )

    ours = record("pseudoreal", "Host", (4, 2.0, 2.1), (1, 1.0, 1.5), host=3)
    theirs = record("fully_shard", "Host", (4, 9.0, None), (1, 3.0, None), host=2)
    others = (
        record("pseudoreal", "Host", (4, 0.1, None), is_compiled=True),
        record("pseudoreal", "Host", (4, 0.1, None), clipping="PerUnit"),
        record("pseudoreal", "Device", (4, 0.1, None)),
        record("fully_shard", "Device", (4, 0.5, None)),
    )
    speculative = record("pseudoreal", "Host", (4, 4.0, None), updates="Speculative")
    claim = claim_of(ours, theirs, *others, speculative)
    assert claim is not None
    assert claim.in_readme == "3.00× to 3.00×"
    assert "the default settings" in claim.result[0]
    assert "a step of pseudoreal is 0.75× to 0.75× as fast" in claim.result[1]
    assert claim.loses == (
        "pseudoreal is slower than fully_shard in 1 of these 2 comparisons",
        "with the state on the host, a process of pseudoreal with the default settings takes 3.0 GiB of host memory; a"
        " process of fully_shard takes 2.0 GiB",
    )
    assert claim.misses == (
        "the predicted time of a step is 50% above the measured time (m, pseudoreal, Host, Global, 8 tokens); the aim"
        " is a difference of at most 20%",
    )
    assert claim.measured == "2026-11-26, at commit 0123abcde, on one, 2 cores"
    assert claim_of(ours, *others) is None, "nothing was measured beside fully_shard with one micro-batch"


def test_predictions_count_those_near_and_name_the_worst() -> None:
    found = [
        Prediction(label="near", predicted=1.1, measured=1.0),
        Prediction(label="far", predicted=0.5, measured=1.0),
    ]
    claim = predictions.claim(found, STAMP)
    assert claim.result == ("1 of 2 predictions of `pseudoreal plan` are within 20% of the measured time",)
    assert claim.misses == (
        "the worst prediction is 50% below the measured time (row *far*); the aim is a difference of at most 20%",
    )
    assert predictions.claim(found[:1], STAMP).misses == ()


def test_checkpoints_name_each_faster_save() -> None:
    def saving(way: str, seconds: float, still: float) -> Saving:
        return Saving(way=way, seconds=seconds, stall_seconds=still, extra_bytes=0)

    savings = [
        saving(OURS_ASYNC, 2.0, 0.004),
        saving(OURS_SYNC, 2.0, 2.0),
        saving("fast", 1.0, 1.0),
        saving("slow", 3.0, 0.5),
    ]
    seconds = dict.fromkeys(
        (
            "copy_seconds",
            "read_seconds",
            "load_seconds",
            "cold_read_seconds",
            "cold_load_seconds",
            "dcp_load_seconds",
            "step_seconds",
        ),
        1.0,
    )
    claim = checkpoints.claim(MeasuredSave(bytes=1, savings=savings, **seconds), STAMP)
    assert claim.result == (
        "an asynchronous save of pseudoreal stops training for 4 ms; saves of the other programs stop training for 500"
        " ms or more",
    )
    assert claim.loses == ("a synchronous save of pseudoreal takes 2.0 times as long as a save with *fast*",)


def test_data_separates_bars_that_are_reached_from_the_others() -> None:
    preparing = Preparing(
        cells=[Cell(stack=OURS, case="text", seconds=[2.0] * 3), Cell(stack=ALONE, case="text", seconds=[1.0] * 3)],
        text_bytes=1,
        documents=1,
        vocabulary=1,
        train_seconds=1.0,
    )
    resident = Resident(
        samples=1, sequence=1, token_bytes=1, files=1, steps=1, batch=1, before_bytes=0, grown_bytes=50 << 20
    )
    results = DataResults(
        machine=MACHINE, preparing=preparing, resident=resident, measured={"preparing": STAMP, "resident": STAMP}
    )
    claim = data_report.claim(results)
    assert claim.result == ("a data set of 10^12 samples adds 50.0 MiB to the memory of a rank",)
    assert (
        "pseudoreal prepares text at 50.0% of the speed of the tokenizer library alone; the aim is at least 85.0%"
        in claim.misses
    )
    waiting = "share of the time of steps in which pseudoreal waits for data"
    assert f"{waiting}: not measured; the aim is less than 1.00%" in claim.misses


def test_mixtures_compare_medians_of_steps_with_the_same_sharding() -> None:
    case, other = (MixtureCase(experts=16, micro_batches=n, compute="float32") for n in (1, 4))

    def run(stack: str, of: MixtureCase, seconds: float) -> MixtureRun:
        steps = [MixtureStep(seconds=99.0, processor=1.0, loss=1.0)] * WARM_UP
        return MixtureRun(stack=stack, case=of, steps=[*steps, MixtureStep(seconds=seconds, processor=1.0, loss=1.0)])

    runs = [
        run(GRADIENTS, case, 1.0),
        run(DEEPSPEED, case, 2.0),
        run(GRADIENTS, other, 1.0),
        run(DEEPSPEED, other, 0.8),
    ]
    claim = steps_report.claim(
        MixtureResults(machine=MACHINE, beside=Beside(runs=runs, versions={"torch": "2", "deepspeed": "1"}))
    )
    assert claim.result == (f"a step of pseudoreal is 0.80× to 2.00× as fast as a step of *{DEEPSPEED}*",)
    assert claim.loses == (f"pseudoreal is slower than *{DEEPSPEED}* in 1 of 2 comparisons; the worst factor is 0.80×",)
    assert claim.against == "deepspeed 1"


def test_operator_beside_others_loses_where_the_faster_peer_has_more_jobs_a_second() -> None:
    def life(stack: str, jobs: int, seconds: float, megabytes: int) -> Life:
        return Life(
            stack=stack,
            jobs=jobs,
            workers=2,
            seconds=seconds,
            requests={},
            writes=1.0,
            processor_seconds=1.0,
            servers_seconds=1.0,
            peak_bytes=megabytes * 10**6,
            reaction=Quantiles(count=1, p50=1.0, p99=1.0),
            others=0.0,
            idle=Idle(seconds=1.0, processor_share=0.0, requests=0, writes=0),
        )

    lives = [
        life("pseudoreal", 200, 10.0, 100),
        life("training-operator", 200, 20.0, 200),
        life("pseudoreal", 1000, 100.0, 110),
        life("training-operator", 1000, 50.0, 400),
        life("Trainer and JobSet", 1000, 80.0, 500),
    ]
    claim = beside_report.claim(Lives(lives=lives))
    assert claim.result == (
        "with 1,000 jobs, pseudoreal's operator takes 110 MB of memory; Kubeflow's operators take 400 MB"
        " (*training-operator*) and 500 MB (*Trainer and JobSet*)",
    )
    assert claim.loses == (
        "with 1,000 jobs, pseudoreal finishes 0.50 times as many jobs a second as the faster of Kubeflow's operators",
    )

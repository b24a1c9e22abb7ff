"""The report on step times, for given runs."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.plan.units import units_of

from benchmarks import agreement, report, step_times
from benchmarks.cases import MODELS, Case, all_cases
from benchmarks.gpu import report as gpu_report
from benchmarks.machine import commit, stamp
from benchmarks.results import Machine, Results, Run, Step
from benchmarks.stacks.registry import STACKS
from benchmarks.summary import COUNTERPARTS, DEVICE, DISK, comparisons, timings

CASE = Case(model="tiny", micro_batches=4, recompute=True)
MACHINE = Machine(processor="abacus", cores=1, memory_gib=1.0, versions={})


def run_of(stack: str, *seconds: float, case: Case = CASE, losses: tuple[float, ...] = (3.0, 2.0)) -> Run:
    """Return a run with two warm-up steps, which the report must ignore, and the given timed steps."""
    warm_up = [Step(seconds=1000.0, loss=loss) for loss in losses]
    return Run(
        stack=stack, case=case, round=0, warm_up=2, steps=warm_up + [Step(seconds=each, loss=1.0) for each in seconds]
    )


def test_the_median_runs_over_the_timed_steps_of_all_rounds() -> None:
    found = timings([run_of(DEVICE, 1.0, 2.0), run_of(DEVICE, 3.0, 100.0, 2.5)])
    assert found[DEVICE, CASE].milliseconds == 2500.0


def test_a_peer_is_compared_with_our_engine_in_the_same_place_and_case() -> None:
    other = CASE.model_copy(update={"micro_batches": 1})
    runs = [run_of(DEVICE, 2.0, 2.0), run_of(DISK, 9.0, 9.0), run_of("fully_shard", 3.0, 3.0)]
    ratios = comparisons(timings([*runs, run_of("fully_shard", 7.0, 7.0, case=other)]))
    assert [(ratio.peer, ratio.case, ratio.ratio) for ratio in ratios] == [("fully_shard", CASE, 1.5)]


def test_the_report_names_losses_as_well_as_wins(tmp_path: Path) -> None:
    runs = [run_of(DEVICE, 2.0, 2.0), run_of("fully_shard", 3.0, 3.0), run_of("DeepSpeed ZeRO-3", 1.0, 1.0)]
    text = step_times.section(Results(machine=MACHINE, runs=runs), tmp_path)
    assert "faster in 1 of 2 comparisons" in text
    assert f"- DeepSpeed ZeRO-3, {CASE.label}: 0.50×" in text
    assert "| fully_shard | 3,000 [3,000–3,000] (1.50×) |" in text
    assert (tmp_path / "step-times-tiny.svg").read_text().count("<svg") == 1


def test_what_was_measured_on_a_busy_machine_is_shown_as_such_and_compared_with_nothing(tmp_path: Path) -> None:
    busy = run_of("DeepSpeed ZeRO-3", 1.0, 2.0, 1.0, 2.0, 1.0)
    runs = [run_of(DEVICE, 2.0, 2.0), run_of("fully_shard", 3.0, 3.0), busy]
    text = step_times.section(Results(machine=MACHINE, runs=runs), tmp_path)
    assert "faster in 1 of 1 comparisons" in text
    assert "| DeepSpeed ZeRO-3 | not quiet (100%) |" in text
    assert "Left out as not quiet: 1 of 3 cells." in text
    assert comparisons(timings([run_of(DEVICE, 1.0, 2.0, 1.0, 2.0, 1.0), run_of("fully_shard", 3.0, 3.0)])) == []


def test_the_report_counts_runs_that_crashed_when_they_ended(tmp_path: Path) -> None:
    runs = [run_of(DEVICE, 2.0, 2.0), run_of("fully_shard", 3.0, 3.0)]
    assert "crashed" not in step_times.section(Results(machine=MACHINE, runs=runs), tmp_path)
    crashed = runs[1].model_copy(update={"crashed_at_end": True})
    text = step_times.section(Results(machine=MACHINE, runs=[runs[0], crashed, crashed]), tmp_path)
    assert text.endswith("after their last step, and count all the same: fully_shard 2.")
    assert "faster in 1 of 1 comparisons" in text


def test_the_report_says_when_and_of_what(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = MACHINE.model_copy(update={"date": "2026-01-02", "commit": "abc+"})
    results = Results(machine=machine, runs=[run_of(DEVICE, 2.0, 2.0), run_of("fully_shard", 3.0, 3.0)])
    monkeypatch.setattr(report, "REPORT", tmp_path / "benchmarks.md")
    monkeypatch.setattr(report, "IMAGES", tmp_path)
    other, older = tmp_path / "other.json", tmp_path / "older.json"
    for path in (other, older):
        path.touch()
    stamp(other)
    monkeypatch.setattr(report, "_FURTHER", {other: lambda: "## Other", older: lambda: "## Older"})
    monkeypatch.setattr(report, "_DATED", {})
    monkeypatch.setattr(report, "TRAINER", older)
    monkeypatch.setattr(report, "read", lambda _: results)
    report.main()
    text = (tmp_path / "benchmarks.md").read_text()
    assert "measured on 2026-01-02, at abc+, on 1 cores (abacus)" in text
    assert f"## Other\n\nMeasured on {datetime.now(UTC).date()}, at {commit()}.\n" in text
    assert "## Older\n\nMeasured on an unknown day, at an unknown commit.\n" in text


def test_sections_whose_results_are_not_here_stay_as_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    document, results, none = tmp_path / "benchmarks.md", tmp_path / "results.json", tmp_path / "none.json"
    document.write_text(
        "# Benchmarks\n\nAt an old commit.\n\n## Step times\n\nold\n\n## Depth\n\nold\n\n## Data\n\nold\n"
    )
    results.touch()
    monkeypatch.setattr(report, "REPORT", document)
    monkeypatch.setattr(report, "TRAINER", none)
    monkeypatch.setattr(gpu_report, "GPU", none)
    monkeypatch.setattr(report, "_FURTHER", {none: lambda: "## Depth"})
    monkeypatch.setattr(report, "_DATED", {results: lambda: "## Data\n\nnew", none: lambda: "## Step times"})
    before = document.read_text()
    report.main()
    assert document.read_text() == before.replace("## Data\n\nold", "## Data\n\nnew")


def test_long_sequences_and_a_hundred_million_parameters_are_among_the_cases() -> None:
    specs = [MODELS[case.model].spec for case in all_cases()]
    assert max(spec.sequence_length for spec in specs) == 2048
    assert max(sum(unit.numel for unit in units_of(spec, Sharing(blocks=spec.layers))) for spec in specs) > 100_000_000
    assert {(case.model, case.micro_batches): case.sequences for case in all_cases()}["long", 4] == 8


def test_runs_that_train_the_same_agree_whatever_the_case() -> None:
    other = CASE.model_copy(update={"micro_batches": 1})
    agreement.check(run_of("fully_shard", losses=(3.0, 2.00005)), [run_of(DEVICE, case=other)])


@pytest.mark.parametrize("wrong", [2.0002, float("nan")])
def test_a_stack_that_trains_something_else_is_named(wrong: float) -> None:
    with pytest.raises(agreement.LossesDiffer, match=r"fully_shard .* in step 1, but pseudoreal, device"):
        agreement.check(run_of("fully_shard", losses=(3.0, wrong)), [run_of(DEVICE)])


def test_every_stack_is_ours_or_has_a_counterpart() -> None:
    assert set(STACKS) == {DEVICE, DISK} | set(COUNTERPARTS) | set(COUNTERPARTS.values())

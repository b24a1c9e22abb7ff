"""`pseudoreal advise` for people and for programs, its files, and its decision by the runs of a trial."""

import json
import re
import shlex
import subprocess
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from pseudoreal_api.resolved.resolve import delink_config
from pseudoreal_api.spec.check import check_job
from pseudoreal_api.wire.messages import ExitCode
from pseudoreal_trainer.checkpoint.delink import delink
from pseudoreal_trainer.cli import trial_runs
from pseudoreal_trainer.cli.command import main
from pseudoreal_trainer.cli.job_file import parse_job
from pseudoreal_trainer.cli.run_command import read_job
from pseudoreal_trainer.cli.run_directory import RunDirectory, open_run
from pseudoreal_trainer.data.token_corpus import open_corpus
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.estimate.advice.evidence import Evidence, read_evidence
from pseudoreal_trainer.training.phase import train_phase

from tests.advice import PAGE, with_output

ROOT = Path(__file__).parents[4]
GPUS = ROOT / "examples" / "hardware" / "gpu-cluster.yaml"
STEP = 6 * 16
"""Tokens of a step."""


@pytest.fixture(autouse=True)
def _evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Evidence.model_validate_json((ROOT / "tests" / "data" / "evidence.json").read_bytes())
    monkeypatch.setattr("pseudoreal_trainer.cli.advise_command.read_evidence", lambda: known)
    monkeypatch.setenv("COLUMNS", "200")


def advise(job: dict[str, Any], file: Path, *options: str, tokens: int | None = 9_600_000) -> Result:
    file.write_text(json.dumps(job, indent=1))  # YAML, too, and all texts in quotes
    budget = [] if tokens is None else ["--tokens", str(tokens)]
    return CliRunner().invoke(main, ["advise", str(file), *budget, *options])


def found(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    advice: dict[str, Any] = json.loads(result.stdout)
    return advice


def test_evidence_of_the_release_can_be_read() -> None:
    assert {trial.study for trial in read_evidence().trials} <= {"dense", "experts"}


def test_documented_output_is_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m tests.advice` writes it."""
    monkeypatch.setattr("pseudoreal_trainer.cli.advise_command.read_evidence", read_evidence)
    assert with_output(PAGE.read_text()) == PAGE.read_text()


def test_json_has_its_stable_keys(job: dict[str, Any], file: Path) -> None:
    advice = found(advise(job, file, "--json", "--hardware", str(GPUS)))
    assert advice.keys() == {
        *("job", "study", "parameters", "tokens", "machine", "recommendation", "certainty", "arms", "left_out"),
    }
    assert advice["recommendation"].keys() == {"verdict", "arm", "reason", "phases"}
    assert advice["certainty"].keys() == {"arm", "seeds", "times_larger", "is_extrapolation", "sentences"}
    for arm in advice["arms"]:
        assert arm.keys() == {
            *("name", "kind", "fits", "seconds", "speed_up_in_seconds", "speed_up_in_tokens", "loss_difference"),
            *("seeds", "phases"),
        }
        for phase in arm["phases"]:
            assert phase.keys() == {
                *("layers", "blocks", "shares_experts", "experts", "until_tokens", "step_seconds", "tokens_per_step"),
                *("bottleneck", "peak_device_bytes", "fits", "reasons", "home", "layout"),
            }
            assert phase["layout"].keys() == {
                *("pipeline", "schedule", "state_sharding", "replicas"),
                *("expert_ranks", "context_ranks", "tensor_ranks"),
                *("micro_batches", "keep"),
            }
    assert [arm["kind"] for arm in advice["arms"]][:3] == ["Unshared", "Throughout", "Sharing"]


def test_seconds_follow_from_those_of_plan(job: dict[str, Any], file: Path) -> None:
    """1e5 steps of unshared training; delinked at 30 %, with a mean speed-up of 1, 3e4 pseudo steps and 7e4 real
    ones."""
    unshared, _, delinked, *_ = found(advise(job, file, "--json", "--hardware", str(GPUS)))["arms"]
    job["spec"]["phases"][0] |= {"workers": 2}
    file.write_text(yaml.safe_dump(job))
    planned = CliRunner().invoke(main, ["plan", str(file), "--json", "--hardware", str(GPUS)])
    pseudo, real = (phase["step_seconds"] for phase in json.loads(planned.stdout)["phases"])
    assert unshared["seconds"] == pytest.approx(1e5 * real)
    assert delinked["seconds"] == pytest.approx(3e4 * pseudo + 7e4 * real)
    assert delinked["speed_up_in_seconds"]["mean"] == pytest.approx(unshared["seconds"] / delinked["seconds"])


def test_text_for_people_says_what_and_how_sure(job: dict[str, Any], file: Path) -> None:
    result = advise(job, file, "--hardware", str(GPUS))
    assert result.exit_code == 0, result.output
    for words in (
        "to the loss that unshared training has after 9,600,000 tokens",
        "shared throughout (smaller)",
        "recommendation: take grown from 4 layers at 30 %, if a trial on your own text and of a larger model agrees",
        "because grown from 4 layers at 30 %, ",
        "how sure:\n- evidence for",
        "5 seeds",
        "--trial FOLDER writes its job files",
    ):
        assert words in result.stdout


def test_recommendation_far_from_the_trials_is_called_an_extrapolation(job: dict[str, Any], file: Path) -> None:
    job["spec"]["model"] |= {"experts": {"type": "TopK", "count": 8, "topK": {"perToken": 2}}}
    near = advise(job, file)
    assert "recommendation: take experts delinked at 30 %\n" in near.stdout
    assert "extrapolated" not in near.stdout.splitlines()[0]
    job["spec"]["model"] |= {"hiddenSize": 256, "feedForward": {"size": 512}}
    far = advise(job, file)
    assert "take experts delinked at 30 %, if a trial on your own text and of a larger model agrees" in far.stdout
    programs = found(advise(job, file, "--json"))
    times = f"{programs['certainty']['times_larger']:,.0f}"
    assert far.stdout.splitlines()[0].endswith(f"; extrapolated {times} times beyond the trials; no interval")
    interval = r"\(\d\.\d\d to \d\.\d\d\)"
    near_figures, far_figures = (shown.stdout.partition("\nhow sure:")[0] for shown in (near, far))
    assert re.search(interval, near_figures)
    assert not re.search(interval, far_figures)
    assert "times as fast as unshared training (no interval at the job's size); at the size of the trials" in far.stdout
    for arm in programs["arms"][1:]:
        assert arm["speed_up_in_seconds"].keys() == {"mean", "low", "high"}
        assert arm["speed_up_in_seconds"]["low"] is arm["speed_up_in_seconds"]["high"] is None


def test_days_and_tokens_are_two_ways_to_say_the_same(job: dict[str, Any], file: Path) -> None:
    by_days = found(advise(job, file, "--json", "--days", "2", tokens=None))
    by_tokens = found(advise(job, file, "--json", tokens=by_days["tokens"]))
    assert by_tokens == by_days
    assert by_days["arms"][0]["seconds"] == pytest.approx(2 * 86_400)


@pytest.mark.parametrize("options", [[], ["--tokens", "5000", "--days", "1"]])
def test_one_budget_is_needed(job: dict[str, Any], file: Path, options: list[str]) -> None:
    result = advise(job, file, *options, tokens=None)
    assert result.exit_code == 2
    assert "give either --tokens or --days" in result.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tokens", "0"], "0 is not in the range"),
        (["--tokens", str(2**63)], "is not in the range"),
        (["--days", "0"], "0 is not in the range"),
        (["--days", "nan"], "nan is no number of days"),
        (["--days", "inf"], "is not in the range"),
        (["--tokens", "many"], "'many' is not a valid integer"),
    ],
)
def test_budget_is_bounded(job: dict[str, Any], file: Path, options: list[str], words: str) -> None:
    result = advise(job, file, *options, tokens=None)
    assert result.exit_code == 2
    assert words in result.stderr


def test_budget_below_a_step_is_an_error(job: dict[str, Any], file: Path) -> None:
    result = advise(job, file, tokens=STEP - 1)
    assert result.exit_code == ExitCode.INVALID_JOB
    assert f"the budget of {STEP - 1:,} tokens is less than a step, which has {STEP:,}" in result.stderr


def test_fault_of_the_job_has_its_line(job: dict[str, Any], file: Path) -> None:
    job["spec"]["model"]["layers"] = 0
    result = advise(job, file)
    assert result.exit_code == ExitCode.INVALID_JOB
    assert f"{file}:" in result.stderr
    assert "spec.model.layers" in result.stderr


def test_profile_that_is_none_is_an_error(job: dict[str, Any], file: Path) -> None:
    result = advise(job, file, "--hardware", str(file))
    assert result.exit_code == ExitCode.INVALID_JOB
    assert "is not one" in result.stderr


def test_model_that_does_not_fit_ends_with_78(job: dict[str, Any], file: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.yaml"
    small.write_text(yaml.safe_dump(yaml.safe_load(GPUS.read_text()) | {"device_bytes": 1000, "host_bytes": 1000}))
    result = advise(job, file, "--hardware", str(small))
    assert result.exit_code == ExitCode.INVALID_JOB
    assert "recommendation: none: take more ranks, another offload.home or a smaller model first" in result.stdout
    assert "the hardware profile's device_bytes is 1000 B" in result.stdout


def test_state_that_needs_another_home_is_said_so(job: dict[str, Any], file: Path, tmp_path: Path) -> None:
    real = found(advise(job, file, "--json", "--hardware", str(GPUS)))["arms"][0]["phases"][0]
    profile = yaml.safe_load(GPUS.read_text()) | {"device_bytes": real["peak_device_bytes"] - 1}
    small = tmp_path / "small.yaml"
    small.write_text(yaml.safe_dump(profile))
    result = advise(job, file, "--hardware", str(small))
    assert result.exit_code == 0
    assert "unshared training does not fit with the job's offload; with offload.home Host a step takes" in result.stdout
    real = found(advise(job, file, "--json", "--hardware", str(small)))["arms"][0]["phases"][0]
    assert real["home"] == "Host"


def test_output_is_the_job_with_the_recommended_phases(job: dict[str, Any], file: Path, tmp_path: Path) -> None:
    job["spec"]["optimizer"]["learningRate"] = "3e-4"
    output = tmp_path / "proposed.yaml"
    result = advise(job, file, "--json", "--output", str(output))
    written = parse_job(output)
    assert json.loads(result.stdout)["recommendation"]["phases"] == yaml.safe_load(output.read_text())["spec"]["phases"]
    assert written.spec.model == check_job(job).spec.model
    assert written.spec.optimizer.learning_rate == "3e-4"
    assert written.spec.phases[-1].workers == 2
    assert "comments, and other objects" in result.stderr


@pytest.mark.parametrize("option", ["--output", "--trial"])
def test_nothing_is_overwritten(job: dict[str, Any], file: Path, option: str) -> None:
    result = advise(job, file, option, str(file))
    assert result.exit_code == ExitCode.INVALID_JOB
    assert f"{option} {file} exists already; choose another name" in result.stderr
    assert parse_job(file).metadata.name == "tiny"


def test_trial_writes_valid_jobs_and_how_to_run_them(job: dict[str, Any], file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    folder.mkdir()
    result = advise(job, file, "--trial", str(folder))
    files = sorted(folder.iterdir())
    assert result.exit_code == 0
    assert CliRunner().invoke(main, ["validate", *map(str, files)]).exit_code == 0
    assert {"unshared-seed1.yaml", "unshared-half-seed5.yaml", "sharing-1-seed3.yaml"} <= {path.name for path in files}
    assert parse_job(files[0]).spec.data.path == str(tmp_path / "nowhere")
    for words in (
        f"{folder}: {len(files)} jobs",
        "hours by the planner on assumed CPUs",
        f'pseudoreal run "$job" --workdir {folder}/runs/',
        f"--from {folder}/runs",
    ):
        assert words in result.stdout
    again = advise(job, file, "--json", "--trial", str(tmp_path / "second"))
    assert json.loads(again.stdout)["arms"]
    assert f"{len(files)} jobs" in again.stderr


def test_commands_of_a_trial_can_be_pasted(job: dict[str, Any], file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "my trial"
    lines = advise(job, file, "--trial", str(folder)).stdout.splitlines()
    decide = next(line for line in lines if line.startswith("decide: ")).removeprefix("decide: pseudoreal ")
    assert shlex.split(decide)[-1] == f"{folder}/runs"
    loop = next(line for line in lines if line.startswith("run: ")).removeprefix("run: ")
    printed = subprocess.run(
        ["bash", "-c", loop.replace("pseudoreal run", "echo")], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert len(printed) == len([*folder.iterdir()])
    assert f"{folder}/sharing-1-seed1.yaml --workdir {folder}/runs/sharing-1-seed1" in printed


def test_trial_needs_a_file(job: dict[str, Any], tmp_path: Path) -> None:
    options = ["--tokens", "10000", "--trial", str(tmp_path / "trial")]
    result = CliRunner().invoke(main, ["advise", "-", *options], input=yaml.safe_dump(job))
    assert result.exit_code == 2
    assert "JOB is standard input" in result.stderr


SLOPE = 0.5
"""Decrease of the loss of unshared training for e times as many tokens."""
REAL = [{"name": "real", "until": {"step": 100}, "workers": 2, "batch": {"sequences": 6}}]
HALF = [REAL[0] | {"until": {"step": 50}}]
DELINKED = [REAL[0] | {"name": "pseudo", "until": {"step": 30}, "sharing": {"blocks": 1}}, *REAL]


def run(
    folder: Path, job: dict[str, Any], phases: list[dict[str, Any]], seed: int, loss: float | None, **spec: Any
) -> None:
    """Write the folder of a run, as `pseudoreal run` leaves it."""
    body = job | {"spec": job["spec"] | {"phases": phases, "data": job["spec"]["data"] | {"seed": seed}} | spec}
    open_run(folder, check_job(body), resume=False)
    last = phases[-1]["until"]["step"]
    lines = [_line(step, last, None if step < last else loss) for step in (1, last)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")


def _line(step: int, last: int, loss: float | None) -> dict[str, Any]:
    gauges = {"tokens_per_second": 1.0, "seconds": 1.0, "remaining_seconds": 0.0, "global_cursor": 1}
    line = {"phase": "real", "step": step, "total_steps": last, "tokens": step * STEP, "loss": 9.0}
    return line | {"validation_loss": loss, "learning_rate": 0.01} | gauges


@pytest.fixture
def runs(job: dict[str, Any], tmp_path: Path) -> Path:
    """Runs of three seeds; delinked runs end 0.1, 0.11 and 0.12 nats below unshared training."""
    folder = tmp_path / "runs"
    for seed, final in ((1, 2.0), (2, 2.1), (3, 2.2)):
        run(folder / f"unshared-{seed}", job, REAL, seed, final)
        run(folder / f"half-{seed}", job, HALF, seed, final + SLOPE * log(2))
        run(folder / f"delinked-{seed}", job, DELINKED, seed, final - 0.09 - seed / 100)
    return folder


def test_runs_of_a_trial_decide(job: dict[str, Any], file: Path, runs: Path) -> None:
    """Speed-ups e^0.2, e^0.22 and e^0.24 in tokens: mean 1.24625, half of the interval 4.3027 * 0.024925 / 3^0.5."""
    advice = found(advise(job, file, "--json", "--hardware", str(GPUS), "--from", str(runs)))
    _, delinked = advice["arms"]
    assert delinked["seeds"] == 3
    assert delinked["speed_up_in_tokens"]["mean"] == pytest.approx(1.24625, abs=1e-5)
    assert delinked["speed_up_in_tokens"]["low"] == pytest.approx(1.24625 - 0.06192, abs=1e-4)
    assert (delinked["loss_difference"]["mean"]) == pytest.approx(-0.11)
    assert advice["recommendation"]["verdict"] == "Take"
    assert [phase.get("sharing") for phase in advice["recommendation"]["phases"]] == [{"blocks": 1}, None]
    said = advise(job, file, "--from", str(runs))
    assert "recommendation: take 1 block to 30 %\n" in said.stdout
    assert "a trial on your own text" not in said.stdout


def test_runs_may_be_named_one_by_one(job: dict[str, Any], file: Path, runs: Path) -> None:
    options = [option for path in sorted(runs.iterdir()) for option in ("--from", str(path))]
    assert found(advise(job, file, "--json", *options)) == found(advise(job, file, "--json", "--from", str(runs)))


def test_runs_without_a_difference_are_level(job: dict[str, Any], file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "level"
    for seed, final, difference in ((1, 2.0, 0.01), (2, 2.1, -0.01)):
        run(folder / f"unshared-{seed}", job, REAL, seed, final)
        run(folder / f"half-{seed}", job, HALF, seed, final + SLOPE * log(2))
        run(folder / f"delinked-{seed}", job, DELINKED, seed, final + difference)
    assert found(advise(job, file, "--json", "--from", str(folder)))["recommendation"]["verdict"] == "Level"


@pytest.mark.parametrize("experts", [False, True])
def test_trial_can_be_trained_and_decides(
    job_body: dict[str, Any], file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, experts: bool
) -> None:
    """Each arm for 20 steps with one seed, at which the schedule's warm-up ends and its decay begins."""
    monkeypatch.setattr("pseudoreal_trainer.estimate.advice.trial.STEPS", 20)
    monkeypatch.setattr("pseudoreal_trainer.estimate.advice.trial.SEEDS", (1,))
    job_body["metadata"].pop("uid")
    job_body["spec"]["precision"] = {"compute": "float32"}
    if experts:
        job_body["spec"]["model"]["experts"] = {"type": "TopK", "count": 8, "topK": {"perToken": 2}}
    trial, folders = tmp_path / "trial", tmp_path / "runs"
    assert advise(job_body, file, "--trial", str(trial)).exit_code == 0
    for job_file in trial.iterdir():
        directory = open_run(folders / job_file.stem, read_job(job_file), resume=False)
        _train(directory)
    advice = found(advise(job_body, file, "--json", "--from", str(folders)))
    kinds = [arm["kind"] for arm in advice["arms"]]
    assert sorted(kinds) == sorted(["Unshared", "Sharing", "Throughout", "Growth"])
    assert advice["recommendation"]["verdict"] == "Level", "one seed decides nothing"


def _train(directory: RunDirectory) -> None:
    """Train the phases of a run in this process."""
    for index in range(len(directory.job.spec.phases)):
        config = directory.phase_config(index)
        if index:
            work = str(directory.path.resolve())
            delink(delink_config(directory.job, index, execution=1, work_directory=work))
        train_phase(config, open_corpus(config), Ranks(0, 1, torch.device("cpu")), lambda: False)


def _refusal(job: dict[str, Any], file: Path, folder: Path) -> str:
    result = advise(job, file, "--from", str(folder))
    assert result.exit_code == ExitCode.INVALID_JOB, result.output
    assert "Traceback" not in result.stderr
    return result.stderr


def test_folder_without_runs_is_refused(job: dict[str, Any], file: Path, tmp_path: Path) -> None:
    assert "has neither job.json nor a folder with one" in _refusal(job, file, tmp_path)
    assert "has neither job.json nor a folder with one" in _refusal(job, file, tmp_path / "missing")


def test_unfinished_run_is_refused(job: dict[str, Any], file: Path, runs: Path) -> None:
    metrics = runs / "delinked-2" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines()[0])
    assert f"{runs / 'delinked-2'} is at step 1 of 100; go on with `pseudoreal run" in _refusal(job, file, runs)
    metrics.write_text("")
    assert "has no step in its last line" in _refusal(job, file, runs)
    metrics.write_bytes(b"\xff\n")
    assert "has no step in its last line" in _refusal(job, file, runs)
    metrics.unlink()
    assert f"{runs / 'delinked-2'} has no metrics.jsonl: nothing was trained" in _refusal(job, file, runs)


@pytest.mark.parametrize("loss", [None, float("inf")])
def test_run_without_a_loss_is_refused(job: dict[str, Any], file: Path, runs: Path, loss: float | None) -> None:
    run(runs / "worse", job, DELINKED, 4, loss)
    assert "worse has no finite validation loss" in _refusal(job, file, runs)


@pytest.mark.parametrize(
    ("phases", "spec", "words"),
    [
        (None, {"model": {"layers": 8}}, "spec.model.layers"),
        (None, {"optimizer": {"weightDecay": "0.2"}}, "spec.optimizer.weightDecay"),
        ({"batch": {"sequences": 12}, "until": {"step": 50}}, {}, "spec.phases[-1].batch.sequences"),
    ],
)
def test_runs_of_another_trial_are_refused(
    job: dict[str, Any], file: Path, runs: Path, phases: dict[str, Any] | None, spec: dict[str, Any], words: str
) -> None:
    changed = {name: job["spec"][name] | change for name, change in spec.items()}
    run(runs / "zz-other", job, [REAL[0] | phases] if phases else DELINKED, 4, 2.0, **changed)
    said = _refusal(job, file, runs)
    assert f"{runs / 'zz-other'} is of another trial than" in said
    assert words in said


def test_damaged_record_is_refused(job: dict[str, Any], file: Path, runs: Path) -> None:
    (runs / "half-1" / "job.json").write_text("{}")
    assert "job.json is not of this release" in _refusal(job, file, runs)


def test_files_and_runs_are_bounded(
    job: dict[str, Any], file: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_runs, "MOST_RUNS", 8)
    assert "--from finds more than 8 runs" in _refusal(job, file, runs)
    monkeypatch.setattr(trial_runs, "MOST_RUNS", 9)
    assert advise(job, file, "--from", str(runs)).exit_code == 0
    with (runs / "half-1" / "metrics.jsonl").open("ab") as metrics:
        metrics.truncate((256 << 20) + 1)
    assert "bytes, more than 268,435,456" in _refusal(job, file, runs)


def test_runs_of_experts_say_nothing_about_a_dense_job(job: dict[str, Any], file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "experts"
    mixture = job["spec"]["model"] | {"experts": {"type": "TopK", "count": 4, "topK": {"perToken": 2}}}
    run(folder / "unshared", job, REAL, 1, 2.0, model=mixture)
    run(folder / "half", job, HALF, 1, 2.3, model=mixture)
    run(folder / "delinked", job, DELINKED, 1, 1.9, model=mixture)
    advice = found(advise(job, file, "--json", "--from", str(folder)))
    assert advice["recommendation"]["verdict"] == "NoEvidence"

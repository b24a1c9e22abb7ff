"""The trials on a GPU, tried on a CPU: a command whose mistakes end with a sentence before anything is trained."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from pseudoreal_dev.machine.progress import progress

from benchmarks.method import gpu
from benchmarks.method.__main__ import main
from benchmarks.method.arms import FIRST_RATES, GPU, TINY, Study, parameters
from benchmarks.method.budget import work_of
from benchmarks.method.results import Result as Row
from benchmarks.method.results import read_results, write_results
from benchmarks.method.schedule import is_known, planned
from benchmarks.method.training import Place
from benchmarks.method.trials import Trials
from tests.unit.benchmarks.method.support.planned import results_of
from tests.unit.trainer.data.support.written import write_native

_DELINKED = "delinked at 30 %"
Command = Callable[..., Result]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of which each has three successors."""
    folder, random = tmp_path_factory.mktemp("text"), np.random.default_rng(7)
    successors = random.integers(1, 200, (200, 3))
    for name, documents in (("train", 20), ("validation", 2)):
        rows = []
        for _ in range(documents):
            row = [1]
            for choice in random.integers(0, 3, 999):
                row.append(int(successors[row[-1], choice]))
            rows.append(row)
        write_native(folder / name, rows, vocabulary=200)
    return folder


@pytest.fixture
def command(text: Path, tmp_path: Path) -> Command:
    def call(*options: str, data: Path = text) -> Result:
        fixed = ["--data", str(data), "--device", "cpu", "--tiny", "--scratch", str(tmp_path / "scratch")]
        return CliRunner().invoke(gpu.main, [*fixed, *options])

    return call


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Trials]:
    """The trials that would have been trained."""
    found: list[Trials] = []
    monkeypatch.setattr(gpu, "train_all", found.append)
    return found


def _chosen_rates(file: Path, *names: str) -> None:
    """Write a loss of each first rate for the arms `names`, the lowest at the middle rate, which is thereby chosen."""
    rows = [
        Row(
            study="dense",
            role="tuning",
            width=16,
            arm=name,
            seed=100,
            rate=rate,
            budget=0.5,
            steps=25,
            tokens=6400,
            loss=3.0 + abs(rate - FIRST_RATES[1]),
            validation_tokens=1,
            seconds_per_step=1.0,
            peak_bytes=1,
            date="2026-11-26",
            commit="abc",
        )
        for name in names
        for rate in FIRST_RATES
    ]
    write_results(rows, file)


def test_arms_are_trained_to_their_losses_on_a_cpu(command: Command, tmp_path: Path) -> None:
    """With rates that an earlier run has chosen."""
    file = tmp_path / "scratch" / "dense.csv"
    _chosen_rates(file, "unshared", _DELINKED)
    done = command("--arm", _DELINKED, "--seeds", "1", "--tokens", "5120")
    assert done.exit_code == 0, done.output
    found = {r.arm: r for r in read_results(file) if r.role == "compared"}
    assert {*found} == {"unshared", _DELINKED}
    assert {(r.width, r.steps, r.tokens, r.budget, r.rate, r.device) for r in found.values()} == {
        (16, 20, 5_120, 1.0, FIRST_RATES[1], "cpu")
    }
    # Below the logarithm of 200 tokens, and not below that of the three successors of each.
    assert all(np.log(3) < r.loss < np.log(200) for r in found.values())
    assert {r.validation_tokens for r in found.values()} == {2 * 1001 // 32 * 32}
    assert not [*(tmp_path / "scratch").rglob("trained.json")], "links that no run needs are deleted"


def test_the_scale_is_gpt2s() -> None:
    """124 M parameters with GPT-2's vocabulary, in bfloat16, 20 tokens for each parameter of the layers."""
    assert parameters("dense", 768) == 84_934_656
    assert pytest.approx(124e6, rel=0.01) == 84_934_656 + 768 * 50_304
    assert {arm.name for arm in GPU.arms["dense"]} == {
        "unshared",
        "shared throughout",
        _DELINKED,
        "4 blocks, delinked at 30 %",
        "grown from 4 layers at 30 %",
    }
    assert {arm.name for arm in GPU.arms["experts"]} == {
        "unshared",
        "experts shared throughout",
        "experts delinked at 30 %",
        "grown from 2 layers at 30 %",
    }
    assert (GPU.precision, GPU.sequence, 768 // GPU.head_size) == ("bfloat16", 1024, 12)
    assert TINY.arms == GPU.arms


def test_a_gpu_trains_one_link_at_a_time_and_keeps_what_is_needed(command: Command, started: list[Trials]) -> None:
    assert command("--tokens", "12800").exit_code == 0
    (trials,) = started
    assert (trials.at_a_time, trials.place.device, trials.keeps_links) == (1, "cpu", False)


@pytest.mark.parametrize(
    ("study", "sentence"),
    [
        ("dense", "{links} trainings, which together read {tokens} B tokens and take {hours} h, at {step} s a step"),
        ("experts", "{links} trainings, which together read {tokens} B tokens and take {hours} h"),
    ],
)
def test_the_page_says_how_much_work_it_is(study: Study, sentence: str) -> None:
    hardware = Path("examples/hardware/gpu-machine.yaml")
    scale = replace(GPU, arms={study: GPU.arms[study]}, sizes={study: GPU.sizes[study]}, vocabulary=50_304)
    pace, work = gpu.predicted_pace(scale, study, Place(Path(), Path(), "cuda"), hardware), work_of(scale)
    figures = {
        "links": work.links,
        "tokens": f"{work.steps * scale.tokens_of_a_step / 1e9:.0f}",
        "step": f"{pace.step:.2f}",
    }
    wanted = sentence.format(**figures, hours=f"{work.seconds(pace.step) / 3600:.0f}")
    assert wanted in Path("docs/gpus.md").read_text()


def test_their_page_is_written_by_the_rules_of_the_registered_one(tmp_path: Path) -> None:
    scale = replace(GPU, arms={"dense": GPU.arms["dense"]}, sizes={"dense": GPU.sizes["dense"]})
    best, rows = {"unshared": 3.0, "grown from 4 layers at 30 %": 2.9}, list[Row]()
    while runs := [one for one in planned(rows, scale) if not is_known(one, one.budgets[-1], rows)]:
        for one in runs:
            loss = best.get(one.run.arm.name, 3.1) + 0.01 * one.run.seed + abs(one.run.rate - 1.2e-3)
            rows += [row.model_copy(update={"loss": loss + 0.3 / row.budget}) for row in results_of(one, loss, "H100")]
    write_results(rows, tmp_path / "dense.csv")
    page = tmp_path / "page" / "dense.md"
    written = CliRunner().invoke(main, ["report", "--results", str(tmp_path / "dense.csv"), "--page", str(page)])
    assert written.exit_code == 0, written.output
    text = page.read_text()
    assert "**Dense, 84,934,656 parameters without the embedding, 1,698,693,120 tokens:**" in text
    assert re.search(r"^\| grown from 4 layers at 30 % \| 3 \| [^|]*\| yes \|", text, re.M)
    assert "bfloat16 on H100." in text
    assert "Everything that the plan asks for is trained." in text
    assert {file.name for file in page.parent.iterdir()} == {"dense.md", "dense.evidence.json", "images"}
    alone = CliRunner().invoke(main, ["report", "--page", str(page)])
    assert "--results and --page go together" in _one(alone)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(progress, "say", lines.append)
    return lines


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    passes = [
        {"compute": "bfloat16", "hidden": 16, "tokens": 128}
        | dict.fromkeys(
            ("block_forward_flops_per_second", "block_backward_flops_per_second", "head_flops_per_second"), 1e9
        )
    ]
    copy = {"latency_seconds": 0, "bytes_per_second": 1e12}
    speeds = {
        "ranks": 1,
        "passes": passes,
        "pass_seconds": 0.0,
        "memory_bytes_per_second": 1e12,
        "update_on_device_seconds_per_element": 0.0,
        "update_on_host_seconds_per_element": 0.0,
        **dict.fromkeys(("h2d", "d2h", "disk_read", "disk_write", "point_to_point"), copy),
        "collectives": [],
        "agree_seconds": 0.0,
    }
    file = tmp_path / "profile.yaml"
    file.write_text(json.dumps({"version": 1, "name": "one", "overlaps": False, "speeds": [speeds]}))
    return file


@pytest.mark.usefixtures("started")
def test_without_a_profile_the_time_is_unknown(command: Command, said: list[str]) -> None:
    assert command("--tokens", "12800").exit_code == 0
    assert "time: unknown; the line of each training says how long the others take" in said
    assert "full budget: 12,800 tokens, 0.347 for each of these parameters, in 50 steps; the text has 20,020" in said


@pytest.mark.usefixtures("started")
def test_a_profile_predicts_the_time(command: Command, said: list[str], profile: Path) -> None:
    done = command("--tokens", "12800", "--hardware", str(profile))
    assert done.exit_code == 0, done.output
    (line,) = [line for line in said if line.startswith("time:")]
    seconds = float(line.split(" at ")[1].split()[0])
    # Products of the layers and of the head: 6 for each parameter and token, forward and backward; those of attention:
    # 2 for each of 16 columns, twice, with half of 32 tokens, three times in 12 layers.
    products = 256 * (6 * (36_864 + 16 * 256) + 3 * 12 * 2 * 2 * 16 * 32 / 2)
    assert seconds == pytest.approx(products / 1e9, rel=0.02)
    assert line.endswith(f"predicted from {profile}, without starts and validation")


def test_hours_give_the_budget_and_it_stays(
    command: Command, started: list[Trials], profile: Path, tmp_path: Path
) -> None:
    options = ("--hardware", str(profile), "--arm", _DELINKED, "--seeds", "1")
    done = command("--hours", "0.006", *options)
    assert done.exit_code == 0, done.output
    settled = json.loads((tmp_path / "scratch" / "trials.json").read_text())
    assert settled["tokens"] % 256 == 0
    assert settled["tokens"] == started[0].plan([]).__next__().run.full_steps * 256
    other = command("--hours", "0.008", *options)
    assert other.exit_code == 2
    assert "holds trials with --hours 0.006, and now it is 0.008; go on with the same options, or name" in _one(other)
    assert command("--hours", "0.006", *options, "--seeds", "2").exit_code == 0
    assert len(started) == 2


def _one(result: Result) -> str:
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--tokens", "1", "--hours", "1"), "--tokens and --hours both give the budget; give one"),
        (("--arm", "shared"), "--arm 'shared' is none of dense's arms: 'unshared', 'shared throughout',"),
        (
            ("--tokens", "1000"),
            "is 4 steps of 256 tokens, and fewer than 20 are not compared: give --tokens 5120",
        ),
        (
            ("--tokens", "1000000"),
            "has 20,020 tokens, and a training reads 999,936, no token twice: prepare more",
        ),
        (("--hardware", "/nowhere.yaml"), "the hardware profile /nowhere.yaml cannot be read"),
        (("--seeds", "0"), "0 is not in the range 1<=x<=20"),
        (("--hours", "0"), "0.0 is not in the range x>0"),
    ],
)
def test_a_mistake_ends_with_a_sentence(
    command: Command, started: list[Trials], options: tuple[str, ...], sentence: str
) -> None:
    done = command(*options)
    assert done.exit_code == 2
    assert sentence in _one(done)
    assert not started


@pytest.mark.usefixtures("started")
def test_a_folder_without_token_files_is_named(command: Command, tmp_path: Path) -> None:
    done = command(data=tmp_path)
    assert done.exit_code == 2
    assert f"{tmp_path}/train/index.json is not there" in _one(done)
    assert "--data names a folder whose folders train and validation hold token files" in _one(done)


def test_a_machine_without_a_gpu_is_told_how_to_try(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = CliRunner().invoke(gpu.main, ["--data", str(text)])
    assert done.exit_code == 2
    assert "torch finds no GPU that it can use; --device cpu --tiny tries the program without one" in _one(done)

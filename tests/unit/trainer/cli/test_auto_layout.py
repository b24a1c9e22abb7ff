"""Layout of a phase with `layout: Auto`: which pod chooses it, when, and that it stays."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.wire.layout import ChosenLayout
from pseudoreal_api.wire.messages import EXIT_CODES
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.cli.auto_layout import resolve_layout
from pseudoreal_trainer.errors import InvalidJobError, TrainingError
from pseudoreal_trainer.estimate.search.auto import choose, laid_out
from pseudoreal_trainer.runtime.heartbeat import read_heartbeat
from pseudoreal_trainer.runtime.pod_folder import PodFolder
from pseudoreal_trainer.runtime.stop import Stop, Stopped
from pseudoreal_trainer.runtime.termination import OUTCOME_DIRECTORY
from pseudoreal_trainer.storage.storage import storage_of

from tests.support.checkpoints import newest
from tests.support.patience import wait_for
from tests.support.pods import start_pod
from tests.unit.trainer.estimate.time.support.profiles import profile

STEPS = 80
CHOOSE = "pseudoreal_trainer.cli.auto_layout.choose"
SLOW_MESSAGES = profile(
    flops=1e9, overlaps=False, ranks=2, memory_bytes_per_second=1e10, point_to_point=1e5, all_reduce=1e12
)
SLOW_SUMS = profile(
    flops=1e9, overlaps=False, ranks=2, memory_bytes_per_second=1e10, all_reduce=1e4, reduce_scatter=1e4, all_gather=1e4
)


@pytest.fixture
def hardware(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes the hardware profile named by the job."""
    path = tmp_path / "hardware.yaml"

    def write(of: Any) -> Path:
        path.write_text(yaml.safe_dump(of.model_dump(mode="json")))
        return path

    return write


@pytest.fixture
def phase(job_body: dict[str, Any], config: Callable[..., PhaseConfig], hardware: Callable[..., Path]) -> PhaseConfig:
    """Return a phase of two ranks in one pod that chooses its layout."""
    path = hardware(SLOW_SUMS)
    job_body["spec"]["precision"] = {"compute": "float32"}
    job_body["spec"]["data"]["validation"]["everySteps"] = 50
    job_body["spec"]["phases"][0] |= {"until": {"step": STEPS}, "processesPerWorker": 2, "batch": {"sequences": 6}}
    job_body["spec"]["phases"][0]["parallelism"] = {"layout": "Auto", "hardware": str(path)}
    job_body["spec"]["phases"][1]["until"] = {"step": STEPS + 1}
    return config(0)


def chosen(phase: PhaseConfig) -> ChosenLayout:
    found, layout = resolve_layout(phase)
    assert layout is not None
    assert found == laid_out(phase, layout)
    assert found.parallelism.layout == "Given"
    return layout


def record(phase: PhaseConfig) -> Path:
    return Path(phase.work_directory) / "layouts" / f"{phase.phase}-{phase.ranks}.json"


def test_a_phase_that_names_its_layout_keeps_it(config: Callable[..., PhaseConfig]) -> None:
    assert resolve_layout(config(1)) == (config(1), None)
    assert not record(config(1)).exists()


def test_an_automatic_layout_is_chosen_once_even_if_the_machine_changes(
    phase: PhaseConfig, hardware: Callable[..., Path]
) -> None:
    first = chosen(phase)
    assert first.pipeline == 2
    hardware(SLOW_MESSAGES)
    assert chosen(phase) == first
    record(phase).unlink()
    assert chosen(phase).pipeline == 1, "the other machine leads to another layout"


def test_each_number_of_ranks_has_a_layout_of_its_own(phase: PhaseConfig) -> None:
    assert chosen(phase).pipeline == 2
    assert chosen(phase.model_copy(update={"workers": 3})).pipeline != 2
    assert chosen(phase).pipeline == 2


def test_pods_that_choose_at_the_same_time_go_on_with_one_layout(
    phase: PhaseConfig, hardware: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another pod, on another machine, writes its record while this pod is choosing."""

    def late(*arguments: Any) -> ChosenLayout:
        found = choose(*arguments)
        monkeypatch.setattr(CHOOSE, choose)
        hardware(SLOW_MESSAGES)
        assert chosen(phase).pipeline == 1
        return found

    monkeypatch.setattr(CHOOSE, late)
    assert chosen(phase).pipeline == 1
    assert [path.name for path in record(phase).parent.iterdir()] == [record(phase).name]


def test_only_one_writer_creates_the_layout_record(tmp_path: Path) -> None:
    storage = storage_of(tmp_path / "file")
    storage.create("mine")
    with pytest.raises(FileExistsError):
        storage.create("another's")
    assert storage.read() == b"mine"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_job_without_a_fitting_layout_is_refused(phase: PhaseConfig, hardware: Callable[..., Path]) -> None:
    hardware(SLOW_SUMS.model_copy(update={"device_bytes": 1}))
    with pytest.raises(InvalidJobError, match="no layout of 2 ranks fits the machine that the profile made up"):
        resolve_layout(phase)
    assert not record(phase).exists()


def test_a_missing_hardware_profile_is_named(phase: PhaseConfig, tmp_path: Path) -> None:
    (tmp_path / "hardware.yaml").unlink()
    with pytest.raises(InvalidJobError, match=r"hardware\.yaml cannot be read"):
        resolve_layout(phase)


@pytest.mark.parametrize(("text", "says"), [("{", "makes no sense"), ('"later"', "is not of this release")])
def test_a_record_that_cannot_be_used_ends_the_pod(phase: PhaseConfig, text: str, says: str) -> None:
    """The record exists to prevent training from continuing in another layout."""
    whole = json.loads(chosen(phase).to_json()) | {"schedule": "Later"}
    record(phase).write_text(text if text == "{" else json.dumps(whole))
    with pytest.raises(TrainingError, match=says):
        resolve_layout(phase)


@pytest.mark.parametrize("gpus", [0, 8])
@pytest.mark.parametrize("compute", ["bfloat16", "float32", "float64"])
def test_without_a_profile_a_machine_is_assumed(phase: PhaseConfig, gpus: int, compute: str) -> None:
    parallelism = phase.parallelism.model_copy(update={"hardware": None})
    precision = phase.precision.model_copy(update={"compute": compute})
    update = {"parallelism": parallelism, "precision": precision, "gpus": gpus}
    assert chosen(phase.model_copy(update=update)).hardware.startswith("assumed ")


def test_a_pod_that_is_asked_to_stop_ends_its_search_at_once(phase: PhaseConfig, tmp_path: Path) -> None:
    """4,096 ranks have tens of thousands of layouts, so the search is long enough to be interrupted."""
    batch = phase.batch.model_copy(update={"sequences": 4096})
    many = phase.model_copy(update={"workers": 2048, "batch": batch})
    pod = start_pod(many, tmp_path / "pod")
    wait_for("a search", record(many).parent.exists, pod.said)
    pod.process.send_signal(signal.SIGTERM)
    assert pod.wait() == EXIT_CODES["Yielded"], pod.said()
    assert "while it searched a layout" in pod.message()["message"]
    assert [*record(many).parent.iterdir()] == []
    assert "layout_chosen" not in pod.said()


def test_a_stop_that_has_come_before_ends_a_search_before_it_begins(phase: PhaseConfig) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        stop = Stop()
        with stop.ending_at_once():
            pass
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped):
            resolve_layout(phase, stop.ending_at_once)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not record(phase).exists()


@pytest.mark.long
def test_ranks_that_are_killed_go_on_in_the_same_layout_on_another_machine(
    phase: PhaseConfig, hardware: Callable[..., Path], tmp_path: Path, train: Any, config: Callable[..., PhaseConfig]
) -> None:
    """The weights equal those of one rank, whose layout is the simplest."""
    metrics = Path(phase.work_directory) / "metrics.jsonl"
    first = start_pod(phase, tmp_path / "first", environment={OUTCOME_DIRECTORY: str(tmp_path / "ranks")})
    wait_for("steps", lambda: metrics.exists() and metrics.read_text().count("\n") > 8, first.said)
    folder = PodFolder(tmp_path / "ranks")
    for path in folder.heartbeats():
        rank = read_heartbeat(path)
        assert rank is not None
        os.kill(rank.pid, signal.SIGKILL)
    assert first.wait() == 1
    before, told = record(phase).read_text(), folder.layout()
    assert told is not None
    assert told.pipeline == 2
    hardware(SLOW_MESSAGES)
    again = start_pod(phase.model_copy(update={"execution": 2}), tmp_path / "second")
    assert again.wait() == 0, again.said()
    assert '"resumed_from": "pseudo-' in again.said()
    assert record(phase).read_text() == before
    assert ChosenLayout.model_validate(again.message()["layout"]) == told

    whole = config(0, "whole")
    plain = whole.parallelism.model_copy(update={"layout": "Given", "hardware": None})
    train(whole.model_copy(update={"parallelism": plain, "processes_per_worker": 1}))
    expected, found = (
        newest(CheckpointStore(tmp_path / work, phase.job.uid), phase.phase, complete=True).whole()
        for work in ("whole", "work")
    )
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-4)

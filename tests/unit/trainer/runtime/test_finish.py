"""A phase that is asked to finish early ends with a committed checkpoint, on all ranks at the same step."""

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from pseudoreal_api.wire.messages import TerminationMessage
from pseudoreal_trainer.checkpoint.delink import delink
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.data.corpus import load_corpus
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.runtime.pod_folder import PodFolder
from pseudoreal_trainer.training.phase import train_phase

from tests.support.forked import start_rank
from tests.support.patience import wait_for
from tests.support.ports import free_port
from tests.support.processes import succeed

UID = "11111111-2222"


@pytest.fixture
def pod(tmp_path: Path) -> PodFolder:
    path = tmp_path / "pod"
    path.mkdir()
    return PodFolder(path)


Train = Callable[..., TerminationMessage]


@pytest.fixture
def train_asked(config: Any, pod: PodFolder) -> Train:
    """Return a function that trains the first phase, with a request to finish during step `finish` and to stop at
    `stop`."""

    def run(finish: int = 0, stop: int = 0) -> TerminationMessage:
        phase, steps = config(0), count(1)

        def asked() -> bool:
            step = next(steps)
            if step == finish:
                pod.ask_to_finish()
            return step == stop

        ranks = Ranks(0, 1, torch.device("cpu"))
        return train_phase(phase, load_corpus(phase.data, phase.model.sequence_length), ranks, asked, pod)

    return run


def test_a_phase_that_is_asked_to_finish_is_complete(train_asked: Train, delink_of: Any, tmp_path: Path) -> None:
    message = train_asked(finish=2)
    assert (message.outcome, message.step, message.checkpoint) == ("Succeeded", 3, "pseudo-00000003")
    assert message.validation_loss is not None
    assert CheckpointStore(tmp_path / "work", UID).committed("pseudo")[-1].phase_complete
    assert delink(delink_of(1)).checkpoint == "real-00000003"


def test_a_phase_asked_to_finish_first_runs_the_steps_that_the_delink_measures(
    job_body: Any, train_asked: Train, delink_of: Any, tmp_path: Path
) -> None:
    job_body["spec"]["phases"][0]["until"]["step"] = 50
    job_body["spec"]["delink"] = {"optimizerState": "Measured", "measuredSteps": 4}
    # The request arrives in step 3 and the pod stops two steps later; the resumed phase knows when to end.
    assert train_asked(finish=2, stop=5).outcome == "Yielded"
    message = train_asked()
    assert (message.outcome, message.step) == ("Succeeded", 7)
    end = CheckpointStore(tmp_path / "work", UID).committed("pseudo")[-1]
    assert end.measurement is not None
    assert end.measurement.steps == 4
    assert delink(delink_of(1)).checkpoint == "real-00000007"


def test_a_request_to_finish_seen_by_one_rank_ends_the_phase_on_all_ranks(
    job_body: Any, config: Any, tmp_path: Path
) -> None:
    job_body["spec"]["phases"][0] |= {"workers": 2, "until": {"step": 100_000}}
    job_body["spec"]["phases"][1]["until"] = {"step": 100_001}
    phase = config(0)
    file = tmp_path / "config.json"
    file.write_text(phase.to_json())
    port = free_port()
    pods = [PodFolder(tmp_path / f"pod-{rank}") for rank in range(2)]
    processes = [start_rank(file, rank, 2, port, folder.path) for rank, folder in enumerate(pods)]
    metrics = Path(phase.work_directory) / "metrics.jsonl"

    def trains() -> bool:
        assert all(process.poll() is None for process in processes)
        return metrics.exists() and metrics.read_text().count("\n") >= 3

    wait_for("three steps", trains)
    pods[1].ask_to_finish()
    succeed(processes)
    messages = [json.loads((folder.path / "0.json").read_text())["message"] for folder in pods]
    assert messages[0] == messages[1]
    assert messages[0]["outcome"] == "Succeeded"
    assert 3 <= messages[0]["step"] < 100_000
    progress, checkpoint = pods[0].progress(), pods[0].checkpoint()
    assert progress is not None
    assert progress.step == messages[0]["step"]
    assert checkpoint is not None
    assert checkpoint.name == messages[0]["checkpoint"]
    assert (pods[1].progress(), pods[1].checkpoint()) == (None, None)

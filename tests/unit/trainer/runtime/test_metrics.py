"""Metrics of a pod, parsed by Prometheus' own parser."""

import socket
import threading
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from urllib.error import HTTPError

import pytest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.parser import text_string_to_metric_families
from pseudoreal_api.wire.messages import ProgressReport
from pseudoreal_api.wire.reports import PodReport, RankReport, SavedCheckpoint
from pseudoreal_trainer.runtime.heartbeat import Heartbeat, HeartbeatFile
from pseudoreal_trainer.runtime.metrics import PATH, exposition, metrics_port, serving_metrics
from pseudoreal_trainer.runtime.pod_folder import PodFolder
from structlog.testing import capture_logs

PROGRESS = ProgressReport(
    phase="pseudo",
    step=3,
    total_steps=9,
    tokens=2**40,
    loss=2.5,
    learning_rate=1e-5,
    tokens_per_second=7.0,
    step_seconds=0.25,
    seconds=1.5,
    remaining_seconds=4.0,
    global_cursor=18,
    waits={"data": 0.25, "reductions": 0.5, "updates": 0.0},
    gradient_norm=1.25,
)


@pytest.fixture
def folder(tmp_path: Path) -> PodFolder:
    path = tmp_path / "pod"
    path.mkdir()
    return PodFolder(path)


def read(text: str) -> Mapping[tuple[str, ...], float]:
    """Return (name without prefix, label values...) -> value."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    prefix = "pseudoreal_trainer_"
    assert all(sample.name.startswith(prefix) for sample in samples)
    return {(sample.name.removeprefix(prefix), *sample.labels.values()): sample.value for sample in samples}


def test_metrics_of_the_pod_of_rank_0_contain_progress_checkpoint_and_ranks() -> None:
    ranks = [RankReport(rank=rank, activity="computing", seconds=1.0, step=3, busy_seconds=rank / 8) for rank in (0, 1)]
    saved = SavedCheckpoint(name="pseudo-2", step=2, seconds=30)
    found = read(exposition(PodReport(ranks=ranks, progress=PROGRESS, checkpoint=saved)).decode())
    expected: dict[tuple[str, ...], float] = {
        ("step",): 3,
        ("total_steps",): 9,
        ("tokens",): 2**40,
        ("loss",): 2.5,
        ("learning_rate",): 1e-5,
        ("gradient_norm",): 1.25,
        ("tokens_per_second",): 7,
        ("step_seconds",): 0.25,
        ("remaining_seconds",): 4,
        ("skipped_steps",): 0,
        ("teraflops_per_second",): 0,
        ("steps_seconds_total",): 1.5,
        ("wait_seconds_total", "data"): 0.25,
        ("wait_seconds_total", "reductions"): 0.5,
        ("wait_seconds_total", "updates"): 0,
        ("checkpoint_age_seconds",): 30,
        ("checkpoint_step",): 2,
        **{("rank_step", rank): 3 for rank in "01"},
        **{("rank_busy_seconds", rank): int(rank) / 8 for rank in "01"},
        **{("rank_activity_seconds", rank): 1 for rank in "01"},
    }
    assert found == expected, "there is no validation loss yet, no GPU and no peak"


REPORT_OF_RANK_8 = PodReport(ranks=[RankReport(rank=8, activity="starting", seconds=2.0, step=0)])


def test_metrics_of_other_pods_contain_their_ranks_only() -> None:
    found = read(exposition(REPORT_OF_RANK_8).decode())
    assert found == {("rank_step", "8"): 0, ("rank_activity_seconds", "8"): 2}
    assert exposition(PodReport()) == b""


def get(port: int | None, path: str = PATH) -> tuple[str, str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def test_metrics_are_served_from_the_files_that_ranks_write(folder: PodFolder) -> None:
    with serving_metrics(folder, 0) as port:
        assert get(port) == (CONTENT_TYPE_PLAIN_0_0_4, "")
        with Heartbeat(HeartbeatFile(folder.heartbeat(0), pid=1, rank=0)).step():
            pass
        folder.leave_progress(PROGRESS)
        folder.leave_checkpoint("pseudo-2", 2)
        found = read(get(port)[1])
        assert (found["step",], found["rank_step", "0"], found["checkpoint_step",]) == (3, 1, 2)
        with pytest.raises(HTTPError, match="404"):
            get(port, "/")


def test_a_silent_metrics_client_delays_neither_other_clients_nor_the_end_of_the_pod(folder: PodFolder) -> None:
    with serving_metrics(folder, 0) as port:
        assert port
        with socket.create_connection(("127.0.0.1", port)):
            assert get(port) == (CONTENT_TYPE_PLAIN_0_0_4, "")
    names = [thread.name for thread in threading.enumerate()]
    begin = time.monotonic()
    with serving_metrics(folder, 0) as port, socket.create_connection(("127.0.0.1", port or 0)):
        pass
    assert time.monotonic() - begin < 30
    assert "metrics" not in names


def test_a_taken_metrics_port_is_logged_and_does_not_fail_the_pod(folder: PodFolder) -> None:
    with serving_metrics(folder, 0) as port, capture_logs() as logs, serving_metrics(folder, port) as second:
        assert second is None
    assert [line["event"] for line in logs] == ["metrics_not_served"]


def test_metrics_are_served_only_if_the_environment_names_a_port(folder: PodFolder) -> None:
    assert metrics_port({}) is None
    assert metrics_port({"PSEUDOREAL_METRICS_PORT": "9464"}) == 9464
    with serving_metrics(folder, metrics_port({})) as port:
        assert port is None

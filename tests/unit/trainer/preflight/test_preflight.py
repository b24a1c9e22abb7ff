"""Preflight checks of real ranks, connected by gloo over loopback, some with a defect."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.spec.network import Preflight
from pseudoreal_trainer.cli import rank as program
from pseudoreal_trainer.engine.ranks.ranks import device_of_rank
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.preflight import probes
from pseudoreal_trainer.preflight import start as preflight_start
from pseudoreal_trainer.preflight.check import CheckedRank, Limits
from pseudoreal_trainer.preflight.check import check as check_rank
from pseudoreal_trainer.preflight.diagnosis import Diagnosis
from pseudoreal_trainer.runtime.termination import OUTCOME_DIRECTORY, collect_outcomes, pod_outcome

from tests.support.ports import free_port
from tests.unit.trainer.preflight.support.rank import PATIENT, QUICK, start, wrong

WORLD = 4

Check = Callable[..., "Ranks"]


class Ranks:
    """Rank processes with the environment that torchrun would set. Rank 0 hosts the store."""

    def __init__(self, folder: Path, config: Path, defects: dict[int, str], limits: Limits) -> None:
        port = free_port()
        common = {"WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1"}
        common |= {"MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        self.log = folder / "rank-0.log"
        self.files = [folder / f"diagnosis-{rank}.json" for rank in range(WORLD)]
        self.processes = []
        for rank, file in enumerate(self.files):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "PSEUDOREAL_NODE_NAME": f"node-{rank}"}
            log = folder / f"rank-{rank}.log"
            self.processes.append(start(common | own, defects.get(rank, "none"), limits, config, file, log))

    def diagnosis(self, rank: int) -> Diagnosis:
        assert self.processes[rank].wait() == 0
        return Diagnosis.model_validate_json(self.files[rank].read_bytes())

    def events(self) -> list[dict[str, Any]]:
        """Return the log events of rank 0."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()


@pytest.fixture
def config_file(config: Any, tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(config(0).model_copy(update={"workers": WORLD, "processes_per_worker": 1}).to_json())
    return file


@pytest.fixture
def check(config_file: Path, tmp_path: Path) -> Iterator[Check]:
    started: list[Ranks] = []

    def run(defects: dict[int, str], limits: Limits = PATIENT) -> Ranks:
        started.append(Ranks(tmp_path, config_file, defects, limits))
        return started[-1]

    yield run
    for ranks in started:
        ranks.kill()


def test_healthy_ranks_pass_the_check(check: Check) -> None:
    ranks = check({})
    assert [ranks.diagnosis(rank) for rank in range(WORLD)] == [Diagnosis()] * WORLD
    event = next(event for event in ranks.events() if event["event"] == "preflight")
    assert (event["ranks"], event["broken"]) == (WORLD, 0)
    assert {row["node"] for row in event["slowest"]} == {f"node-{rank}" for rank in range(WORLD)}
    assert all(row["product_ms"] > 0 and row["across_ms"] > 0 for row in event["slowest"])
    assert event["median"]["within_ms"] is None


@pytest.mark.solo
def test_a_slow_rank_is_named_and_does_not_stop_the_training(check: Check) -> None:
    ranks = check({1: "slow"})
    assert [ranks.diagnosis(rank).broken for rank in range(WORLD)] == [[]] * WORLD
    (fault,) = ranks.diagnosis(0).slow
    assert fault.ranks == [1]
    assert "rank 1 on node node-1 took" in fault.text
    assert "for a product" in fault.text
    warning = next(event for event in ranks.events() if event["event"] == "preflight_slow")
    assert (warning["level"], warning["rank"]) == ("warning", 1)


def test_a_rank_that_computes_a_wrong_product_is_named_to_all(check: Check) -> None:
    ranks = check({2: "wrong"})
    for rank in range(WORLD):
        (fault,) = ranks.diagnosis(rank).broken
        assert (fault.ranks, fault.text) == ([2], "rank 2 on node node-2 computed a wrong product")


@pytest.mark.solo
def test_a_rank_that_does_not_answer_is_named_in_time(check: Check) -> None:
    ranks = check({1: "silent"}, QUICK)
    begin = time.monotonic()
    for rank in (0, 2, 3):
        (fault,) = ranks.diagnosis(rank).broken
        assert fault.ranks == [1]
        assert "rank 1 on node node-1 began and did not answer" in fault.text
    rounds = 3
    assert time.monotonic() - begin < QUICK.start + QUICK.product + rounds * QUICK.pairing + 2 * QUICK.answer


def test_a_hanging_device_does_not_delay_the_check_beyond_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = threading.Event()
    monkeypatch.setattr(probes, "product", lambda _: hanging.wait(300))
    own = CheckedRank(rank=0, workers=1, processes=1, node="node-0", device=lambda: torch.device("cpu"))
    begin = time.monotonic()
    (fault,) = check_rank(own, Limits(product=0.01))[0].broken
    assert time.monotonic() - begin < 200
    hanging.set()
    assert fault.text == "rank 0 on node node-0 computed no product (it never ended)"


def test_a_missing_gpu_is_part_of_the_result_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check does not fall back to the CPU, where the other ranks would wait for this one in vain."""
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    own = CheckedRank(rank=0, workers=1, processes=1, node="node-0", device=lambda: device_of_rank(8))
    (fault,) = check_rank(own, Limits(product=30))[0].broken
    assert "rank 0 on node node-0 computed no product (TrainingError: this pod asked for 8 GPUs" in fault.text
    assert "torch finds 0 GPUs" in fault.text


def test_the_expected_product_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probes.product(torch.device("cpu"))[1]
    monkeypatch.setattr(probes, "multiply", wrong)
    assert not probes.product(torch.device("cpu"))[1]


@pytest.fixture
def checked(job_body: dict[str, Any], config: Any, config_file: Path) -> Callable[[str], PhaseConfig]:
    """Return a function that makes the configuration of a single rank with this check mode; the rank has no
    partners."""

    def make(mode: str) -> PhaseConfig:
        job_body["spec"]["network"] = {"preflight": {"mode": mode}}
        made: PhaseConfig = config(0)
        config_file.write_text(made.to_json())
        return made

    return make


def _defective(monkeypatch: pytest.MonkeyPatch, defect: str) -> None:
    command = (sys.executable, "-m", "tests.unit.trainer.preflight.support.rank", defect)
    monkeypatch.setattr(preflight_start, "COMMAND", command)
    monkeypatch.setenv("PSEUDOREAL_NODE_NAME", "node-a")


@pytest.mark.parametrize(
    ("defect", "says"),
    [
        ("wrong", "found: rank 0 on node node-a computed a wrong product. Look at that node's accelerators"),
        ("killed", "the check of rank 0 on node node-a before the first step ended with signal 9"),
    ],
)
def test_mode_fail_ends_the_worker_with_a_broken_rank(
    checked: Callable[[str], PhaseConfig], config_file: Path, monkeypatch: Any, defect: str, says: str
) -> None:
    _defective(monkeypatch, defect)
    with pytest.raises(TrainingError, match=says):
        preflight_start.run_preflight(checked("Fail"), config_file)


@pytest.mark.parametrize(
    ("defect", "says"),
    [
        ("wrong", "rank 0 on node node-a computed a wrong product"),
        ("killed", "the check of rank 0 on node node-a before the first step ended with signal 9"),
    ],
)
def test_mode_warn_logs_the_broken_rank_and_continues(
    checked: Callable[[str], PhaseConfig],
    config_file: Path,
    monkeypatch: Any,
    defect: str,
    says: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    _defective(monkeypatch, defect)
    preflight_start.run_preflight(checked("Warn"), config_file)
    (warning,) = [line for line in capfd.readouterr().out.splitlines() if "preflight_broken" in line]
    assert says in warning


def test_the_termination_message_of_a_pod_names_the_suspect(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise TrainingError("rank 5 on node n5 computed a wrong product", suspect=5)

    file = tmp_path / "config.json"
    file.write_text(config(0).model_copy(update={"preflight": Preflight(mode="Fail")}).to_json())
    for name, value in (("run_preflight", refuse), ("configure_logs", lambda: None), ("signal", Mock())):
        monkeypatch.setattr(program, name, value)
    monkeypatch.setenv(OUTCOME_DIRECTORY, str(tmp_path / "outcomes"))
    (tmp_path / "outcomes").mkdir()
    program.run_rank(file, Mock())
    message = pod_outcome(collect_outcomes(tmp_path / "outcomes"), config(0), 1, False)
    assert (message.outcome, message.suspect) == ("Failed", 5)
    assert "rank 5 on node n5" in message.message

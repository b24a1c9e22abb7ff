import json
from pathlib import Path
from typing import Any

import pytest
from pseudoreal_api.wire.messages import InPlace, Outcome, TerminationMessage
from pseudoreal_trainer.cgroups import PodMemory
from pseudoreal_trainer.runtime.failures import Crash
from pseudoreal_trainer.runtime.termination import (
    RankOutcome,
    is_death,
    pod_outcome,
    termination_message,
    write_termination,
)


def _left(local_rank: int, outcome: Outcome, time_ns: int = 0, text: str = "", peer_lost: bool = False) -> RankOutcome:
    message = TerminationMessage(outcome=outcome, phase="pseudo", execution=1, message=text, peer_lost=peer_lost)
    return RankOutcome(local_rank=local_rank, time_ns=time_ns, message=message)


@pytest.fixture
def pair(config: Any) -> Any:
    return config(0).model_copy(update={"processes_per_worker": 2})


@pytest.mark.parametrize("outcome", ["Succeeded", "Yielded"])
def test_without_errors_the_pod_reports_the_message_of_its_first_rank(outcome: Outcome, pair: Any) -> None:
    found = pod_outcome([_left(1, outcome, text="one"), _left(0, outcome, text="zero")], pair, 0, False)
    assert (found.outcome, found.message) == (outcome, "zero")


def test_the_earliest_error_is_the_outcome_of_the_pod(pair: Any) -> None:
    outcomes = [_left(0, "Failed", 20, "connection closed"), _left(1, "Failed", 10, "disk full")]
    assert pod_outcome(outcomes, pair, 1, False).message == "disk full"


def test_an_error_of_a_rank_itself_wins_over_errors_about_lost_peers(pair: Any) -> None:
    outcomes = [_left(0, "Failed", 10, "connection closed", peer_lost=True), _left(1, "Failed", 20, "disk full")]
    found = pod_outcome(outcomes, pair, 1, False)
    assert (found.message, found.peer_lost) == ("disk full", False)
    assert pod_outcome([outcomes[0], _left(1, "Failed", 20, "closed", peer_lost=True)], pair, 1, False).peer_lost


def test_a_rank_killed_by_its_own_pod_is_not_reported_as_killed(pair: Any) -> None:
    assert pod_outcome([], pair, 1, False, ended={0}).message.startswith("local rank 1 ended without a message")
    failed = _left(0, "Failed", 10, "disk full")
    assert pod_outcome([failed], pair, 1, False, ended={1}).message == "disk full"


def test_a_pod_with_a_killed_rank_does_not_report_a_lost_peer(pair: Any) -> None:
    left = [_left(0, "Failed", 20, "connection closed", peer_lost=True)]
    assert not pod_outcome(left, pair, 1, False).peer_lost


def test_a_rank_without_an_outcome_is_reported_as_killed(pair: Any) -> None:
    found = pod_outcome([_left(0, "Failed", 20, "connection closed")], pair, 1, False)
    assert (found.outcome, found.exit_code) == ("Failed", 1)
    assert "local rank 1 ended without a message" in found.message
    assert "exit code is 1" in found.message
    assert "connection closed" in found.message


@pytest.mark.parametrize("left", [[], [_left(0, "Failed", 20, "connection closed", peer_lost=True)]], ids=len)
def test_a_pod_with_a_killed_torchrun_does_not_report_a_lost_peer(left: list[Any], pair: Any) -> None:
    """Reports of lost peers by ranks that torchrun left behind do not matter."""
    found = pod_outcome(left, pair, -9, False)
    assert (found.outcome, found.peer_lost) == ("Failed", False)
    assert found.message.startswith("torchrun was killed (signal 9), and with it local rank")


def test_out_of_memory_wins_over_earlier_errors(pair: Any) -> None:
    outcomes = [_left(0, "Failed", 10, "connection closed"), _left(1, "OutOfMemory", 20, "asked for 2 GiB")]
    found = pod_outcome(outcomes, pair, 1, False)
    assert (found.outcome, found.exit_code, found.message) == ("OutOfMemory", 71, "asked for 2 GiB")
    assert pod_outcome(outcomes[1:], pair, 1, False).outcome == "OutOfMemory"


def test_a_rank_without_an_outcome_after_an_oom_kill_is_out_of_memory(pair: Any) -> None:
    exhausted = PodMemory(limit=1 << 30, peak=1 << 30, kills=1)
    left = [_left(0, "Failed", 20, "connection closed")]
    found = pod_outcome(left, pair, 1, False, exhausted)
    assert (found.outcome, found.exit_code) == ("OutOfMemory", 71)
    assert "ended local rank 1, as the pod used more than its limit of 1.00 GiB" in found.message
    everyone = [*left, _left(1, "Failed", 10, "disk full")]
    assert pod_outcome(everyone, pair, 1, False, exhausted).message == "disk full", (
        "the killed process was none of the ranks"
    )


def test_invalid_job_wins_over_a_rank_that_was_stopped(pair: Any) -> None:
    assert pod_outcome([_left(1, "InvalidJob", 5, "no text")], pair, 1, False).message == "no text"


def test_a_pod_stopped_before_its_first_step_yields(pair: Any) -> None:
    assert pod_outcome([], pair, -15, True).exit_code == 75


def test_a_pod_that_killed_all_of_its_ranks_reports_a_lost_peer(pair: Any) -> None:
    found = pod_outcome([], pair, 1, False, ended={0, 1})
    assert (found.outcome, found.peer_lost) == ("Failed", True)


LOST = _left(0, "Failed", 20, "connection closed", peer_lost=True)


@pytest.mark.parametrize(
    ("left", "facts"),
    [
        pytest.param([], {}, id="all killed"),
        pytest.param([LOST], {}, id="one killed"),
        pytest.param([LOST], {"ended": {1}}, id="of another pod"),
        pytest.param([], {"ended": {0, 1}}, id="told of another pod"),
        pytest.param([LOST], {"crashes": {1: Crash("Segmentation fault", "line 1")}}, id="one crashed"),
    ],
)
def test_a_process_that_died_here_or_elsewhere_is_a_death(left: list[Any], facts: dict[str, Any], pair: Any) -> None:
    assert _is_death(left, pair, **facts)


@pytest.mark.parametrize(
    ("left", "facts"),
    [
        pytest.param([_left(0, "Succeeded"), _left(1, "Succeeded")], {"exit_code": 0}, id="succeeded"),
        pytest.param([_left(0, "Yielded"), _left(1, "Yielded")], {}, id="yielded"),
        pytest.param([], {"stopped": True}, id="stopped before the first step"),
        pytest.param([LOST], {"stopped": True, "ended": {1}}, id="stopped while another pod was lost"),
        pytest.param([LOST, _left(1, "Failed", 30, "the loss is nan")], {}, id="an error of its own"),
        pytest.param([_left(0, "InvalidJob", 1, "no text")], {}, id="an invalid job"),
        pytest.param([_left(0, "OutOfMemory", 1, "asked for 2 GiB")], {}, id="a lack of memory"),
        pytest.param([LOST], {"exhausted": PodMemory(limit=1 << 30, kills=1)}, id="killed by the kernel for memory"),
        pytest.param([LOST], {"exit_code": -9}, id="torchrun killed"),
    ],
)
def test_other_ends_are_not_a_death(left: list[Any], facts: dict[str, Any], pair: Any) -> None:
    assert not _is_death(left, pair, **facts)


def _is_death(
    left: list[Any],
    pair: Any,
    *,
    exit_code: int = 1,
    stopped: bool = False,
    exhausted: PodMemory | None = None,
    ended: Any = (),
    crashes: Any = None,
) -> bool:
    message = pod_outcome(left, pair, exit_code, stopped, exhausted, ended, crashes)
    return is_death(message, left, pair, exit_code, stopped, ended)


def test_the_termination_message_fits_kubernetes(pair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSEUDOREAL_TERMINATION_LOG", str(tmp_path / "log"))
    in_place = InPlace(restarts=10, peer_lost=False, message="𝄞" * 300)
    write_termination(termination_message("Failed", pair, "ü\n" * 3000).model_copy(update={"in_place": in_place}))
    content = (tmp_path / "log").read_bytes()
    assert len(content) <= 4096
    assert json.loads(content)["outcome"] == "Failed"

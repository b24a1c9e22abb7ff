"""Reports of a pod to the operator: their content, how they are sent, and the pod's behaviour if sending fails."""

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.client import HTTPException
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pseudoreal_api.wire.authorities import authorities_digest
from pseudoreal_api.wire.messages import ProgressReport
from pseudoreal_api.wire.reports import REPORT_BYTES, PodReport, RankReport, ReportAnswer
from pseudoreal_trainer.runtime.heartbeat import Heartbeat, HeartbeatFile, HeartbeatRecord, process_state
from pseudoreal_trainer.runtime.pod_folder import PodFolder
from pseudoreal_trainer.runtime.reports import (
    ReportRejected,
    _Reports,
    delay,
    endpoint_of_pod,
    pod_report,
    rank_heartbeat,
    reporting,
)
from structlog.testing import capture_logs

from tests.unit.trainer.runtime.support.server import Server, serving

REPORT = PodReport(ranks=[RankReport(rank=0, activity="waiting", seconds=1.5, step=3)])
PROGRESS = ProgressReport(
    phase="pseudo",
    step=3,
    total_steps=9,
    tokens=30,
    loss=2.5,
    learning_rate=0.1,
    tokens_per_second=7.0,
    seconds=1.0,
    remaining_seconds=4.0,
    global_cursor=18,
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path) as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> PodFolder:
    path = tmp_path / "pod"
    path.mkdir()
    return PodFolder(path)


def test_each_report_carries_the_current_token(server: Server) -> None:
    endpoint = server.endpoint("pod-a")
    assert not endpoint.send(REPORT).finish_phase
    endpoint.token.write_text("pod-b\n")
    server.finishes.add("pod-b")
    assert endpoint.send(REPORT).finish_phase
    assert server.newest == {"pod-a": REPORT, "pod-b": REPORT}


def test_a_server_signed_by_another_authority_gets_no_token(server: Server, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    stranger = Server(other)
    endpoint = server.endpoint("pod-a")
    with pytest.raises(ssl.SSLCertVerificationError):
        replace(endpoint, authority=stranger.authority).send(REPORT)
    with pytest.raises(ssl.SSLCertVerificationError, match="localhost"):
        replace(endpoint, url=server.url.replace("127.0.0.1", "localhost")).send(REPORT)
    assert not server.seen


@pytest.mark.parametrize(
    ("manner", "raised"),
    [
        ("500", ReportRejected),
        ("403", ReportRejected),
        ("302", ReportRejected),
        ("garbage", ValueError),
        ("no http", HTTPException),
    ],
)
def test_an_invalid_answer_is_an_error(manner: str, raised: type[Exception], server: Server) -> None:
    server.manner = manner
    with pytest.raises(raised):
        server.endpoint("pod-a").send(REPORT)


def test_the_retry_after_of_a_rejected_report_is_read(server: Server) -> None:
    server.manner = "429"
    with pytest.raises(ReportRejected, match="429") as refused:
        server.endpoint("pod-a").send(REPORT)
    assert refused.value.retry_after == 1.0


def test_a_report_to_a_silent_server_times_out(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pseudoreal_trainer.runtime.reports._SECONDS", 0.2)
    server.manner = "hangs"
    with pytest.raises(TimeoutError):
        server.endpoint("pod-a").send(REPORT)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"https://127.0.0.1:{deaf.getsockname()[1]}/"
        with pytest.raises(TimeoutError):
            replace(server.endpoint("pod-a"), url=url).send(REPORT)


def test_an_authority_that_an_answer_named_is_trusted_from_then_on(server: Server, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with serving(other) as successor:
        endpoint = server.endpoint("pod-a")
        moved = replace(endpoint, url=successor.url)
        with pytest.raises(ssl.SSLCertVerificationError):
            moved.send(REPORT)
        server.authorities = successor.authority.read_text()
        endpoint.send(REPORT)
        endpoint.send(REPORT)
        moved._learned = endpoint._learned
        assert not moved.send(REPORT).finish_phase
        endpoint._idle = None
        assert not endpoint.send(REPORT).finish_phase, "the original CA is still trusted"
    first, second = (authorities_digest(each.authority.read_text()) for each in (server, successor))
    assert server.trusted == [first, second, second]


@pytest.mark.parametrize(
    "said", ["", "no certificate", "-----BEGIN CERTIFICATE-----\nQQ==\n-----END CERTIFICATE-----\n"]
)
def test_an_answer_without_a_usable_authority_changes_no_trust(server: Server, said: str) -> None:
    endpoint = server.endpoint("pod-a")
    server.authorities, server.finishes = said, {"pod-a"}
    for _ in range(2):
        endpoint._idle = None
        assert endpoint.send(REPORT).finish_phase
    assert endpoint._learned is None


def test_a_pod_without_an_authority_trusts_nobody(server: Server) -> None:
    """The system's CA certificates are not trusted either."""
    endpoint = server.endpoint("pod-a")
    endpoint.authority.write_text("none")
    with pytest.raises(ValueError, match="holds no certificate"):
        endpoint.send(REPORT)
    assert not server.seen


def test_without_the_variable_of_the_endpoint_no_report_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PSEUDOREAL_REPORT_URL", raising=False)
    assert endpoint_of_pod() is None
    monkeypatch.setenv("PSEUDOREAL_REPORT_URL", "https://operator:8443/v1/report")
    found = endpoint_of_pod()
    assert found is not None
    assert str(found.token) == "/var/run/secrets/pseudoreal.dev/token"
    assert str(found.authority) == "/etc/pseudoreal/operator-ca.crt"


def test_a_report_contains_the_files_in_the_folder_of_the_pod(folder: PodFolder) -> None:
    assert pod_report(folder) == PodReport()
    for rank in (4, 5):
        Heartbeat(HeartbeatFile(folder.heartbeat(rank - 4), os.getpid(), rank)).working("imports torch")
    folder.write_progress(PROGRESS)
    folder.write_checkpoint("pseudo-00000002", 2)
    found = pod_report(folder)
    assert [(beat.rank, beat.activity, beat.doing) for beat in found.ranks] == [
        (rank, "starting", "imports torch") for rank in (4, 5)
    ]
    assert {beat.process for beat in found.ranks} == {process_state(os.getpid())}
    assert found.progress == PROGRESS
    assert found.checkpoint is not None
    assert (found.checkpoint.name, found.checkpoint.step) == ("pseudo-00000002", 2)
    assert 0 <= found.checkpoint.seconds < 60


def test_the_largest_report_is_one_that_the_operator_reads(folder: PodFolder) -> None:
    for rank in range(64):
        Heartbeat(HeartbeatFile(folder.heartbeat(rank), os.getpid(), 10_000 + rank)).working("ü" * 64)
    folder.write_progress(PROGRESS)
    folder.write_checkpoint("p" * 253, 10**9)
    found = pod_report(folder)
    assert len(found.ranks) == 64
    assert len(found.to_json().encode()) < REPORT_BYTES


def test_ages_in_a_report_are_relative_to_the_time_of_the_report() -> None:
    record = HeartbeatRecord(
        pid=1,
        rank=2,
        activity="waiting",
        doing="x",
        since=90.0,
        step=7,
        busy_seconds=0.5,
        save_began=60.0,
    )
    found = rank_heartbeat(record, 100.0, "S")
    assert (found.seconds, found.saving_seconds, found.busy_seconds) == (10.0, 40.0, 0.5)
    assert rank_heartbeat(record, 80.0, "S").seconds == 0.0


def test_the_state_of_a_process_is_read_whatever_its_name(tmp_path: Path) -> None:
    strange = tmp_path / "a) R 1 (b"
    strange.symlink_to("/bin/sleep")
    process = subprocess.Popen([strange, "60"])
    try:
        assert process_state(process.pid) in "RSD"
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert process_state(process.pid) == "T"
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process_state(process.pid) == "Z"
    finally:
        process.kill()
        process.wait()
    assert process_state(process.pid) == "X"


def test_an_answer_asks_the_pod_to_finish_its_phase(server: Server, folder: PodFolder) -> None:
    with reporting(folder, server.endpoint("pod-a"), 0.01):
        server.wait_for(lambda: server.seen["answers"] >= 2)
        assert not folder.is_asked_to_finish()
        server.finishes.add("pod-a")
        before = server.seen["answers"]
        server.wait_for(lambda: server.seen["answers"] >= before + 3)
    assert folder.is_asked_to_finish()


def _is_met(server: Server, manner: str, times: int) -> bool:
    return server.seen[manner] >= times


def test_a_failing_endpoint_is_logged_once_until_it_works_again(
    server: Server, folder: PodFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pseudoreal_trainer.runtime.reports._MOST_SECONDS", 0.02)
    manners = ["500", "answers", "garbage", "no http", "answers"]
    with capture_logs() as logs, reporting(folder, server.endpoint("pod-a"), 0.01):
        for manner in manners:
            with server.changed:
                server.manner, begin = manner, server.seen[manner]
            server.wait_for(partial(_is_met, server, manner, begin + 4))
    assert [entry["event"] for entry in logs] == ["reports_do_not_arrive", "reports_arrive_again"] * 2
    assert "it answers 500" in logs[0]["error"]
    assert "pod-a" not in json.dumps(logs), "no token in the log"


def test_reports_arrive_again_after_the_endpoint_was_away(
    server: Server, folder: PodFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pseudoreal_trainer.runtime.reports._MOST_SECONDS", 0.02)
    endpoint = server.endpoint("pod-a")
    server.stop()
    with capture_logs() as logs, reporting(folder, endpoint, 0.01):
        server.wait_for(lambda: logs)
        server.start()
        server.wait_for(lambda: server.seen["answers"] >= 1)
    assert "Connection refused" in logs[0]["error"]


def test_a_report_that_hangs_does_not_keep_the_pod_from_ending(server: Server, folder: PodFolder) -> None:
    server.manner = "hangs"
    program = (
        "import sys; from pathlib import Path; from pseudoreal_trainer.runtime import reports;"
        "from pseudoreal_trainer.runtime.pod_folder import PodFolder;"
        "from pseudoreal_trainer.runtime.reports import reporting\n"
        "reports._SECONDS = 600.0\n"
        "with reporting(PodFolder(Path(sys.argv[1])), reports.Endpoint(sys.argv[2], *map(Path, sys.argv[3:]))):\n"
        "    sys.stdin.read()\n"
        "sys.exit(75)"
    )
    endpoint = server.endpoint("pod-a")
    arguments = [str(folder.path), endpoint.url, str(endpoint.token), str(endpoint.authority)]
    process = subprocess.Popen([sys.executable, "-c", program, *arguments], stdin=subprocess.PIPE)
    server.wait_for(lambda: server.seen["hangs"])
    process.communicate(b"", timeout=30)
    assert process.returncode == 75


class Limited:
    url = ""

    def send(self, _: PodReport) -> ReportAnswer:
        raise ReportRejected(429, "Too Many Requests", 300.0)


def test_the_next_report_waits_for_retry_after(folder: PodFolder) -> None:
    reports = _Reports(folder, Limited(), 5.0)  # type: ignore[arg-type]
    with capture_logs():
        assert [reports._report() for _ in range(3)] == [300.0] * 3


@given(st.floats(0.1, 60), st.integers(0, 10_000), st.floats(0, 1e9), st.floats(0, 1))
def test_the_delay_between_reports_grows_with_failures_up_to_a_limit(
    seconds: float, failures: int, retry_after: float, chance: float
) -> None:
    found = delay(seconds, failures, retry_after, chance)
    if failures == 0:
        assert found == seconds
    else:
        assert min(retry_after, 600.0) <= found <= max(90.0, 600.0)
        assert found >= min(60.0, seconds * 2) * 0.5
        assert delay(seconds, failures + 1, 0.0, chance) >= delay(seconds, failures, 0.0, chance)


def test_reports_share_a_connection_and_take_a_new_one_when_it_was_closed(server: Server) -> None:
    endpoint = server.endpoint("pod-a")
    for _ in range(3):
        endpoint.send(REPORT)
    assert (server.seen["answers"], server.connections) == (3, 1)
    server.stop()
    server.start()
    endpoint.send(REPORT)
    assert (server.seen["answers"], server.connections) == (4, 2)


def test_the_report_after_an_invalid_answer_takes_a_new_connection(server: Server) -> None:
    endpoint = server.endpoint("pod-a")
    for manner in ("garbage", "no http", "500"):
        server.manner = manner
        with pytest.raises((ValueError, HTTPException, ReportRejected)):
            endpoint.send(REPORT)
        server.manner = "answers"
        assert not endpoint.send(REPORT).finish_phase


def test_the_last_report_contains_the_last_checkpoint(server: Server, folder: PodFolder) -> None:
    with reporting(folder, server.endpoint("pod-a"), seconds=1000.0):
        server.wait_for(lambda: server.newest)
        folder.write_checkpoint("pseudo-00000007", 7)
    report = server.newest["pod-a"]
    assert report.checkpoint is not None
    assert report.checkpoint.name == "pseudo-00000007"

"""`Client.watch` and `wait`: what they yield, how they connect again, and when they give up."""

import asyncio
import contextlib
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pseudoreal import (
    AsyncClient,
    Client,
    Forbidden,
    JobDeleted,
    JobEnded,
    JobFailed,
    NotFound,
    Unreadable,
    WaitTimeout,
)
from pseudoreal import api as api_module
from pseudoreal import watch as watch_module
from pseudoreal.errors import ClientError, Unreachable
from pseudoreal.watch import Watch
from pseudoreal_api.status.status import PseudoRealJobStatus

from tests.support.jobs import good_job
from tests.support.patience import PATIENCE_SECONDS, wait_for
from tests.unit.client.support.observed_jobs import condition
from tests.unit.client.support.scripted_server import Answer, ScriptedServer, failure, one, scripted_server, watch

Json = dict[str, Any]
JOB, WATCH = "pseudorealjobs/llm", "watch=true"
DONE = {"state": "Complete", "completionTime": "2030-01-01T00:00:00Z"}


def stored(version: int, uid: str = "one", **status: Any) -> Json:
    body = good_job("llm")
    body["metadata"] |= {"namespace": "team", "uid": uid, "resourceVersion": str(version)}
    return body | {"status": {"state": "Training"} | status}


def bookmark(version: int) -> tuple[str, Json]:
    return "BOOKMARK", {"metadata": {"resourceVersion": str(version)}}


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        yield running


@pytest.fixture
def kubeconfig(server: ScriptedServer, tmp_path: Path) -> str:
    return server.kubeconfig(tmp_path / "config")


@pytest.fixture
def client(kubeconfig: str) -> Client:
    return Client(kubeconfig=kubeconfig)


def steps(watched: Watch) -> list[tuple[str, int]]:
    """Return state and execution of each status. A watch that should end and does not is closed after a while."""
    timer = threading.Timer(PATIENCE_SECONDS / 3, watched.close)
    timer.start()
    try:
        return [(status.state, status.execution) for status in watched]
    finally:
        timer.cancel()


def test_watch_yields_the_present_status_then_each_other_one_until_the_job_has_ended(
    client: Client, server: ScriptedServer
) -> None:
    changed_spec = stored(3) | {"spec": stored(3)["spec"] | {"suspend": True}}
    later = watch(("MODIFIED", changed_spec), ("MODIFIED", stored(4, execution=2)), ("MODIFIED", stored(5, **DONE)))
    server.answers = {WATCH: [later], JOB: [one(stored(2))]}
    assert steps(client.watch("llm")) == [("Training", 0), ("Training", 2), ("Complete", 0)]
    assert server.watches() == ["2"]
    assert server.asked[-1]["fieldSelector"] == "metadata.name=llm"


def test_watch_goes_on_after_the_last_change_when_the_connection_is_lost(
    client: Client, server: ScriptedServer
) -> None:
    """Lost in an answer, refused for a moment, and ended by the API server after a bookmark."""
    server.answers = {
        WATCH: [
            watch(("MODIFIED", stored(4, execution=1)), cut=True),
            one(failure(503, message="restarting"), 503),
            one(failure(429, message="slow down"), 429),
            watch(("MODIFIED", stored(6, execution=2)), bookmark(9)),
            watch(("MODIFIED", stored(11, **DONE))),
        ],
        JOB: [one(stored(2))],
    }
    assert steps(client.watch("llm")) == [("Training", 0), ("Training", 1), ("Training", 2), ("Complete", 0)]
    assert server.watches() == ["2", "4", "4", "4", "9"]


@pytest.mark.parametrize(
    "expired",
    [one(failure(410, "Expired", "too old"), 410), watch(("ERROR", failure(410, "Expired", "too old")))],
    ids=["refused", "in the stream"],
)
def test_watch_reads_the_job_again_when_its_version_is_too_old(
    client: Client, server: ScriptedServer, expired: Answer
) -> None:
    server.answers = {
        WATCH: [expired, watch(("MODIFIED", stored(30, **DONE)))],
        JOB: [one(stored(2)), one(stored(20, execution=3))],
    }
    assert steps(client.watch("llm")) == [("Training", 0), ("Training", 3), ("Complete", 0)]
    assert server.watches() == ["2", "20"]


@pytest.mark.parametrize(
    "last",
    [("DELETED", stored(3)), ("MODIFIED", stored(3, uid="another"))],
    ids=["deleted", "replaced by one of the same name"],
)
def test_watch_of_a_job_that_is_deleted_is_an_error(
    client: Client, server: ScriptedServer, last: tuple[str, Json]
) -> None:
    server.answers = {WATCH: [watch(last)], JOB: [one(stored(2))]}
    with pytest.raises(JobDeleted, match="job llm in namespace team was deleted"):
        steps(client.watch("llm"))


def test_a_job_that_is_gone_when_it_is_read_again_was_deleted(client: Client, server: ScriptedServer) -> None:
    gone = one(failure(404) | {"details": {"name": "llm"}}, 404)
    server.answers = {WATCH: [one(failure(410, "Expired"), 410)], JOB: [one(stored(2)), gone]}
    with pytest.raises(JobDeleted):
        steps(client.watch("llm"))


@pytest.mark.parametrize("line", ["{", "[]", '{"type": "MODIFIED", "object": {}}'])
def test_a_line_that_is_no_change_counts_as_a_lost_connection(
    client: Client, server: ScriptedServer, line: str
) -> None:
    broken = Answer(200, (line,))
    server.answers = {WATCH: [broken, watch(("MODIFIED", stored(3, **DONE)))], JOB: [one(stored(2))]}
    assert steps(client.watch("llm")) == [("Training", 0), ("Complete", 0)]


def test_watch_ends_with_a_refusal_and_with_the_servers_sentence(client: Client, server: ScriptedServer) -> None:
    server.answers = {WATCH: [one(failure(403, "Forbidden", "you cannot watch"), 403)], JOB: [one(stored(2))]}
    with pytest.raises(Forbidden, match="ask for the role `view`") as refused:
        steps(client.watch("llm"))
    assert (refused.value.server_message, refused.value.status) == ("you cannot watch", 403)


def test_a_missing_job_is_an_error_of_the_first_request(client: Client, server: ScriptedServer) -> None:
    server.answers = {JOB: [one(failure(404) | {"details": {"name": "llm"}}, 404)]}
    with pytest.raises(NotFound, match="no PseudoRealJob llm in namespace team"):
        next(client.watch("llm"))


def test_watch_gives_up_after_its_patience(
    client: Client, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "PATIENCE_SECONDS", 0.5)
    server.answers = {WATCH: [one(failure(503, message="gone for good"), 503)], JOB: [one(stored(2))]}
    with pytest.raises(ClientError, match="gone for good"):
        steps(client.watch("llm"))
    assert len(server.watches()) > 1


def test_a_silent_connection_is_made_again(
    client: Client, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_module, "_SILENCE_SECONDS", 0.2)
    server.answers = {
        WATCH: [watch(bookmark(3), silent=True), watch(("MODIFIED", stored(4, **DONE)))],
        JOB: [one(stored(2))],
    }
    assert steps(client.watch("llm")) == [("Training", 0), ("Complete", 0)]
    assert server.watches() == ["2", "3"]


def test_a_change_beyond_the_bound_is_an_error(
    client: Client, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers = {WATCH: [watch(("MODIFIED", stored(3) | {"junk": "x" * 50_000}))], JOB: [one(stored(2))]}
    monkeypatch.setattr(api_module, "MOST_BYTES", 40_000)
    with pytest.raises(Unreadable, match="a change of PseudoRealJob llm in namespace team has more than"):
        steps(client.watch("llm"))


def test_a_status_of_another_release_is_an_error(client: Client, server: ScriptedServer) -> None:
    server.answers = {JOB: [one(stored(2, phases="many"))]}
    with pytest.raises(Unreadable, match="the status of llm in namespace team cannot be read"):
        next(client.watch("llm"))


def test_watch_can_be_closed_by_another_thread_while_it_waits(client: Client, server: ScriptedServer) -> None:
    server.answers = {WATCH: [watch(silent=True)], JOB: [one(stored(2))]}
    watched, found = client.watch("llm"), list[tuple[str, int]]()
    reader = threading.Thread(target=lambda: found.extend(steps(watched)))
    reader.start()
    wait_for("the watch", server.watches)
    watched.close()
    reader.join(PATIENCE_SECONDS)
    assert (reader.is_alive(), found) == (False, [("Training", 0)])


class TestWait:
    def test_wait_returns_the_awaited_status(self, client: Client, server: ScriptedServer) -> None:
        server.answers = {WATCH: [watch(("MODIFIED", stored(3, state="Suspended")))], JOB: [one(stored(2))]}
        assert client.wait("llm", until="Suspended").state == "Suspended"
        assert client.wait("llm", until=lambda status: status.state == "Suspended").state == "Suspended"

    def test_a_failed_job_is_an_error_with_the_operators_sentence(self, client: Client, server: ScriptedServer) -> None:
        told = condition("Failed", "True", "CorpusMissing", "There is no text in corpus/kjv.")
        server.answers = {JOB: [one(stored(2, **DONE | {"state": "Failed"}, conditions=[told]))]}
        with pytest.raises(JobFailed, match="job llm failed: There is no text in corpus/kjv") as failed:
            client.wait("llm")
        assert failed.value.job_status.state == "Failed"

    def test_a_job_that_has_ended_will_not_reach_another_state(self, client: Client, server: ScriptedServer) -> None:
        server.answers = {JOB: [one(stored(2, **DONE))]}
        with pytest.raises(JobEnded, match=r"job llm has ended \(Complete\) and was not Suspended before"):
            client.wait("llm", until="Suspended")

    @pytest.mark.parametrize(
        "wait",
        [
            lambda config: Client(kubeconfig=config).wait("llm", timeout=0.5),
            lambda config: asyncio.run(AsyncClient(kubeconfig=config).wait("llm", timeout=0.5)),
        ],
        ids=["synchronous", "asyncio"],
    )
    def test_a_wait_ends_in_time_although_the_server_is_silent(
        self, kubeconfig: str, server: ScriptedServer, wait: Callable[[str], object]
    ) -> None:
        server.answers = {WATCH: [watch(silent=True)], JOB: [one(stored(2))]}
        begin = time.monotonic()
        with pytest.raises(WaitTimeout, match=r"job llm was not Complete within 0.5 seconds; it is Training") as late:
            wait(kubeconfig)
        assert isinstance(late.value, TimeoutError)
        # The read of the stream alone would wait for 150 seconds.
        assert time.monotonic() - begin < 100

    def test_a_state_that_no_job_has_is_refused_at_once(self, client: Client) -> None:
        with pytest.raises(ValueError, match="until='Trainig' is no state of a job; the states are Pending, Queued"):
            client.wait("llm", until="Trainig")

    def test_states_are_those_of_the_contract(self) -> None:
        said = PseudoRealJobStatus.model_fields["state"].description or ""
        from pseudoreal.client import _STATES

        assert [word for word in said.replace(",", " ").replace(".", " ").split() if word in _STATES] == [*_STATES]


async def test_a_cancelled_task_ends_its_watch(kubeconfig: str, server: ScriptedServer) -> None:
    server.answers = {WATCH: [watch(silent=True)], JOB: [one(stored(2))]}
    client, found = AsyncClient(kubeconfig=kubeconfig), list[str]()

    async def follow() -> None:
        async for status in client.watch("llm"):
            found.append(status.state)

    task = asyncio.create_task(follow())
    await asyncio.to_thread(wait_for, "the watch", server.watches)
    before = {thread for thread in threading.enumerate() if thread.name.startswith("pseudoreal")}
    assert before
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_for, "the end of the thread", lambda: not any(t.is_alive() for t in before))
    assert found == ["Training"]


def test_an_unreachable_cluster_is_an_error_at_once(kubeconfig: str, tmp_path: Path) -> None:
    config = yaml.safe_load(Path(kubeconfig).read_text())
    config["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:1"
    (tmp_path / "nowhere").write_text(yaml.safe_dump(config))
    with pytest.raises(Unreachable, match=r"the cluster at http://127.0.0.1:1 does not answer"):
        next(Client(kubeconfig=str(tmp_path / "nowhere")).watch("llm"))


class TestLogs:
    def lines(self, client: Client, **options: Any) -> list[str]:
        return [*client.api.log("team", "pod", **options)]

    def test_a_line_without_end_is_cut(
        self, client: Client, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(api_module, "MOST_LINE_BYTES", 10)
        server.answers = {"/log": [Answer(lines=("x" * 30_000, "short", "y" * 11))]}
        assert self.lines(client) == ["x" * 10, "short", "y" * 10]

    def test_a_line_without_end_does_not_fill_the_memory(self) -> None:
        class Endless:
            def stream(self) -> Iterator[bytes]:
                return (b"x" * 2**16 for _ in range(500))

            def close(self) -> None: ...

        tracemalloc.start()
        try:
            (line,) = api_module.Lines(Endless(), 2**10, lambda error: ClientError(str(error)))
            assert tracemalloc.get_traced_memory()[1] < 2**20  # the line has 31 MiB
        finally:
            tracemalloc.stop()
        assert len(line) == 2**10 + 1

    def test_a_log_beyond_the_bound_is_an_error_after_its_first_lines(
        self, client: Client, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(api_module, "MOST_LOG_BYTES", 12)
        server.answers = {"/log": [Answer(lines=("first", "other"))]}
        lines = client.api.log("team", "pod")
        assert [next(lines), next(lines)] == ["first", "other"]
        with pytest.raises(Unreadable, match="the log of pod pod has more than"):
            next(lines)
        assert server.asked[0]["limitBytes"] == "12"
        # A followed log has no end, so it has no bound but that of its lines.
        assert self.lines(client, follow=True) == ["first", "other"]
